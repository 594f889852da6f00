"""`lockstep demo`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import print
from lockstep.system.defaults import DEFAULT_BACKEND

KINDS = ("checks", "dots", "rays", "rings", "stripes")
"""The textures that are drawn. A network learns to distinguish these fastest."""
IMAGES = 1100


def command(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for images and run.")] = Path(
        "demo"
    ),
    images: Annotated[
        int,
        typer.Option(
            help="Training images to draw, plus a fifth as many for validation.", min=5 * len(KINDS)
        ),
    ] = IMAGES,
    backend: options.Backend = DEFAULT_BACKEND,
    assignments: options.Set = None,
) -> None:
    """Draw images, train ResNet-50 v1.5, and predict some."""
    from lockstep import backends, load, load_recipe, train
    from lockstep.cli.console import Reporter
    from lockstep.cli.train import describe_next
    from lockstep.data.textures import draw_data_set

    changes, execution = options.read_settings(assignments, backend)
    # Wrong settings and a missing framework are reported before anything is drawn.
    recipe = load_recipe("demo").replace(**({"logits": len(KINDS)} | changes))
    backends.check_installed(execution.backend)
    data = out / "data"
    run = out / "run"
    data.mkdir(parents=True, exist_ok=True)  # an unwritable folder is reported first
    with Reporter() as reporter:
        training = images // len(KINDS) * len(KINDS)
        validation = images // len(KINDS) // 5 * len(KINDS)
        reporter.say(
            f"{training} training and {validation} validation images of {len(KINDS)} textures in"
            f" {data}"
        )
        progress = reporter.progress("drawing images")
        draw_data_set(
            data, train_images=training, val_images=validation, kinds=KINDS, progress=progress
        )
        if "precision" not in changes:
            precision, why = _choose_precision(run, execution)
            reporter.say(f"precision {precision}: {why}")
            recipe = recipe.replace(precision=precision)
        train(recipe, data, run, execution=execution, listener=reporter)
    pictures = [min(folder.iterdir()) for folder in sorted((data / "val").glob("[!.]*"))]
    predictions = load(run).on(execution=execution).predict(pictures, top=1)
    print("\npredictions:")
    for picture, prediction in zip(pictures, predictions, strict=True):
        name = picture.relative_to(data)
        percent = 100 * prediction.probabilities[0]
        print(f"  {name!s:<24} {prediction.classes[0]:<10} {percent:6.2f} %")
    print(f"\nimages: {data}\nrun:    {run}\n{describe_next(run, pictures[0])}")


def _choose_precision(run: Path, execution: Any) -> tuple[str, str]:
    """Return the precision to train in, and why: that of an existing run, else one that is fast on
    this machine."""
    from lockstep import backends, load_recipe
    from lockstep.backends.emulation import find_emulation
    from lockstep.system.machine import fast_precision

    if (run / "recipe.yaml").is_file():
        return load_recipe(run).precision, "the existing run was started with it"
    world = backends.load(execution.backend).world(execution)
    world.close()
    device = world.device if world.on_gpu else "this processor"
    if not world.on_gpu and "bf16" in backends.FRAMEWORKS[execution.backend].always_emulates:
        return "fp32", f"{execution.backend} multiplies bf16 as fp32 on processors"
    if fast_precision(world.on_gpu) == "bf16":
        return "bf16", f"{device} multiplies it in hardware"
    if world.on_gpu:  # older GPUs have fp16, but it needs loss scaling
        return "fp32", f"{device} does not multiply bf16 in hardware"
    emulated = find_emulation("bf16", on_gpu=False, backend=execution.backend)
    return "fp32", str(emulated or "training in bf16 was not measured on processors like this one")
