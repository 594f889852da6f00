"""`lockstep demo`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import print


def command(
    out: Annotated[Path, typer.Option(help="Folder for images and run.")] = Path("demo"),
    backend: options.Backend = "torch",
    assignments: options.Set = None,
) -> None:
    """Draw images, train ResNet-50 v1.5 on them, and predict some."""
    from lockstep import load_recipe, predict, train
    from lockstep.cli.console import Reporter
    from lockstep.data.textures import draw_data_set

    changes, execution = options.settings(assignments, backend)
    data, run = out / "data", out / "run"
    with Reporter() as reporter:
        draw_data_set(data, progress=lambda done, total: reporter(_drawing(done, total)))
        train(load_recipe("demo").replace(**changes), data, run, execution=execution, listener=reporter)
    images = [sorted(folder.iterdir())[0] for folder in sorted((data / "val").iterdir()) if folder.name[0] != "."]
    print("\npredictions:")
    for found in predict(run, images, top=1, execution=execution):
        name = found.path.relative_to(data)
        print(f"  {name!s:<24} {found.classes[0]:<10} {100 * found.probabilities[0]:6.2f} %")
    print(f"\nimages: {data}\nrun:    {run}\ntry:    lockstep predict --run {run} {images[0]}")


def _drawing(done: int, total: int) -> dict[str, object]:
    return {"kind": "progress", "what": "drawing images", "done": done, "total": total}
