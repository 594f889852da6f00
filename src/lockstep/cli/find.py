"""`lockstep find batch`, and `find step`, which it starts for every try; `lockstep find lr`."""

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import UserError
from lockstep.system.files import write_json
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.benchmark.largest_batch import Found, Try
    from lockstep.recipes import Execution, Recipe
    from lockstep.recipes.rate_range import RateRange
    from lockstep.runs.events import Event

GB = 10**9
_KEPT = ("device", "compile", "layout", "recompute", "deterministic", "fused", "cuda_graph")
"""Execution fields that the printed command repeats. The backend has its own option."""

app = typer.Typer(help="Find settings that suit this machine.", no_args_is_help=True)


@app.command("step", hidden=True)
def step(folder: Path) -> None:
    """Try the training step that a folder describes."""
    from lockstep.benchmark.step_process import work

    raise typer.Exit(work(folder))


Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Another model, such as resnext101-32x4d.")
]
Precision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Another precision: fp32, tf32, bf16 or fp16.")
]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Compute twice to save memory: off or blocks (docs/how-to/memory.md)."
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        help="Memory limit of a process on a CPU, in GB (default: free memory).",
        min=0.01,
    ),
]
Start = Annotated[int, typer.Option(help="First batch to try, in images.", min=1)]


@app.command("batch")
def batch(
    recipe: options.Recipe = "resnet50-paddle-90ep",
    model: Model = None,
    precision: Precision = None,
    recompute: Recompute = None,
    backend: options.Backend = DEFAULT_BACKEND,
    memory_gb: Memory = None,
    start: Start = 32,
    assignments: options.Set = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the largest batch whose training step fits into memory.

    Tries two steps of each batch in a new process, and prints how to train the recipe's batch.
    """
    from lockstep.benchmark.largest_batch import find_batch
    from lockstep.recipes import load_recipe
    from lockstep.recipes.image_sizes import list_sizes

    options.interrupt_on_signals()
    changes, execution = options.read_settings(assignments, backend, recompute=recompute)
    if model is not None:
        changes["model"] = model
    if precision is not None:
        changes["precision"] = precision
    changed = load_recipe(recipe).replace(**changes)
    memory_bytes = _limit_memory(execution, memory_gb)
    if not as_json:
        print(
            f"{describe_model(changed)} in {changed.precision} at {list_sizes(changed)[-1]} px on"
            f" {execution.backend}"
        )
    answer = find_batch(
        changed,
        execution,
        memory_bytes=memory_bytes,
        first=start,
        listener=lambda done: None if as_json else print(describe_try(done)),
    )
    if as_json:
        print_json(answer.fields() | {"memory_bytes": memory_bytes})
        return
    sets = [f"{name}={value}" for name, value in changes.items()]
    defaults = type(execution)().fields()
    for name, value in execution.fields().items():
        if name in _KEPT and value != defaults[name]:
            sets.append(f"{name}={value}")
    for line in advise(recipe, changed, execution, answer, sets):
        print(line)


Data = Annotated[Path, typer.Option(metavar="PATH", help="Training images, in any format.")]
Weights = Annotated[
    str | None,
    typer.Option(metavar="SOURCE", help="Start from a run, a file or a name (`lockstep weights`)."),
]
Split = Annotated[
    float | None, typer.Option(metavar="SHARE", help="Share that a run would use for validation.")
]
Steps = Annotated[int, typer.Option(help="At most N steps, 20 to 1000.", min=20, max=1000)]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for lr.png and lr.json.")]


@app.command("lr")
def lr(
    data: Data,
    recipe: options.RecipeOrNone = None,
    weights: Weights = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    split: Split = None,
    backend: options.Backend = DEFAULT_BACKEND,
    steps: Steps = 200,
    low: Annotated[float, typer.Option("--from", help="First learning rate.")] = 1e-6,
    high: Annotated[float, typer.Option("--to", help="Last learning rate.")] = 10.0,
    out: Out = Path("lr-range"),
    assignments: options.Set = None,
) -> None:
    """Find a learning rate by the range test (arXiv:1506.01186).

    Trains a few steps while the rate rises, until the loss diverges; keeps only the curve.
    """
    from lockstep.cli.console import Reporter
    from lockstep.recipes.rate_range import describe_range
    from lockstep.reporting.rate_curve import draw_curve
    from lockstep.runs.rate_range import find_rate
    from lockstep.runs.recipe_from_images import say_where
    from lockstep.runs.resuming import complete_settings

    changes, how = options.read_fields(assignments, backend=backend)
    if split is not None:
        changes["validation_share"] = split
    with tempfile.TemporaryDirectory(prefix="lockstep-find-lr-") as folder:
        run = Path(folder) / "run"
        settings = complete_settings(run, recipe, data, changes=changes, how=how)
        source = options.choose_start(weights, model, ignore, settings)
        options.prepare(settings.execution, run)
        with Reporter() as reporter:

            def show(event: "Event") -> None:
                options.show_note(event)
                if event["kind"] == "progress":
                    reporter(event)
                elif event["kind"] == "settled":
                    # The folder of the recipe is removed.
                    where = say_where(settings.out)
                    lines = [line.removesuffix(where) for line in event["lines"]]
                    reporter({"kind": "settled", "lines": lines})

            result = find_rate(settings, source, steps=steps, low=low, high=high, listener=show)
    out.mkdir(parents=True, exist_ok=True)
    draw_curve(result, out / "lr.png")
    write_json(out / "lr.json", describe_range(result))
    for line in advise_rate(result, steps):
        print(line)
    print(f"wrote {out / 'lr.png'}, {out / 'lr.json'}")


def advise_rate(result: "RateRange", steps: int) -> list[str]:
    """Return what a range test of `steps` steps shows, as lines."""
    first = f"{result.rates[0]:.2g}"
    end = f"{result.rates[-1]:.2g}"
    lines = [f"{len(result.losses)} of {steps} steps, the rate rising from {first} to {end}"]
    if result.diverged:
        lines.append(f"the loss diverges at {end}")
    else:
        lines.append("the loss did not diverge: try a greater --to")
    if result.field is None:
        lines.append(
            "the loss never fell by more than it varies, so no rate is suggested: try more --steps,"
            " or look at the curve"
        )
        return lines
    lines.append(f"the loss is lowest at {result.lowest:.2g}; a tenth of that is a good peak")
    lines.append(f"--set lr={result.field:g}")
    return lines


def describe_model(recipe: "Recipe") -> str:
    """Return a model's name; "a custom model" if it has none."""
    return recipe.model if isinstance(recipe.model, str) else "a custom model"


def describe_try(done: "Try") -> str:
    """Return the line of a try.

    >>> from lockstep.benchmark.largest_batch import Try
    >>> describe_try(Try(64, 2, True, images_per_sec=11.26, peak_memory_bytes=3_100_000_000))
    '    64 images in 2 parts: fits, 11.3 images/s, main memory 3.1 GB'
    >>> describe_try(Try(128, 1, False, "std::exception"))
    '   128 images: failed: std::exception'
    >>> describe_try(Try(128, 1, False, "no memory", is_short=True))
    '   128 images: too large'
    """
    text = f"{done.images:>6} images"
    if done.parts > 1:
        text += f" in {done.parts} parts"
    if not done.fits:
        if done.is_short:
            return f"{text}: too large"
        reason = (done.reason.splitlines() or ["?"])[0]
        return f"{text}: failed: {reason:.100}"
    text += ": fits"
    if done.images_per_sec is not None:
        text += f", {done.images_per_sec:.1f} images/s"
    if done.peak_memory_bytes is not None:
        text += f", main memory {done.peak_memory_bytes / GB:.1f} GB"
    return text


def advise(
    name: str, recipe: "Recipe", execution: "Execution", answer: "Found", sets: list[str]
) -> list[str]:
    """Return the last lines: the answer, and the command that trains the recipe's batch on this
    machine with these settings."""
    from lockstep.backends import FRAMEWORKS

    images = recipe.global_batch_images
    parts = answer.parts
    command = ["lockstep", "train", "--recipe", name]
    if execution.backend != DEFAULT_BACKEND:
        command += ["--backend", execution.backend]
    command += ["--data", "DATA", "--out", "RUN"]
    if parts > 1:
        sets = [*sets, f"accumulation_steps={parts}"]
    for setting in sets:
        command += ["--set", setting]
    at_once = "at once" if parts == 1 else f"in {parts} parts of {images // parts}"
    lines = [
        f"The largest batch that fits: {format_count(answer.largest, 'image')}.",
        f"The recipe's {format_count(images, 'image')} fit {at_once}:",
        shlex.join(command),
    ]
    if execution.recompute == "off" and FRAMEWORKS[execution.backend].recomputes and parts > 1:
        lines.append("With --recompute blocks, larger batches fit, but steps take longer.")
    return lines


def _limit_memory(execution: "Execution", memory_gb: float | None) -> int | None:
    """Return how much a process may allocate on a CPU. Raises `UserError` if the free memory is
    unknown, or if `memory_gb` is set for a GPU."""
    from lockstep.system.machine import free_memory_bytes, gpu

    on_gpu = execution.device != "cpu" and gpu() is not None
    if on_gpu and memory_gb is not None:
        raise UserError(
            "--memory-gb limits main memory, but the steps run on a GPU; leave it out, or add --set"
            " device=cpu"
        )
    limit = free_memory_bytes() if memory_gb is None else int(memory_gb * GB)
    if limit is None and not on_gpu:
        raise UserError(
            "this system does not report how much memory is free; set a limit: --memory-gb"
        )
    return limit
