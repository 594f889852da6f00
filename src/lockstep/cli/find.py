"""`lockstep find batch`, and `find step`, which it starts for every try."""

import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lockstep.cli import options
from lockstep.cli.hints import Command
from lockstep.cli.terminal import print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND

if TYPE_CHECKING:
    from lockstep.benchmark.largest_batch import Found, Try
    from lockstep.recipes import Execution, Recipe

GB = 10**9
_KEPT = ("device", "compile", "layout", "recompute", "deterministic", "fused", "cuda_graph")
"""Fields of the execution that the command of the answer repeats. The backend has its own option.
"""

app = typer.Typer(help="Find settings that suit this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Find settings that suit this machine."""


@app.command("step", hidden=True)
def step(folder: Path) -> None:
    """Try the training step that a folder describes."""
    from lockstep.benchmark.step_process import work

    raise typer.Exit(work(folder))


@app.command("batch", cls=Command)
def batch(
    recipe: Annotated[
        str, typer.Option(help="A published recipe or a YAML file.")
    ] = "resnet50-paddle-90ep",
    model: Annotated[
        str | None, typer.Option(help="Another model, such as resnext101-32x4d.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Another precision: fp32, tf32, bf16 or fp16.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="What is computed twice to save memory: off or blocks (docs/gpu.md)."),
    ] = None,
    backend: options.Backend = DEFAULT_BACKEND,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            help=(
                "Memory that a process may allocate on a CPU, in GB (10^9 bytes); by default what"
                " is free now."
            ),
            min=0.01,
        ),
    ] = None,
    start: Annotated[
        int, typer.Option(help="The first batch that is tried, in images.", min=1)
    ] = 32,
    assignments: options.Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the largest batch whose training step fits into memory.

    Each try is a process that takes two steps. Prints how the recipe's own batch is trained.
    """
    from lockstep.benchmark.largest_batch import find_batch
    from lockstep.recipes import load_recipe

    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # like Ctrl-C: stop the worker and say what is known
        signal.signal(number, _interrupt)
    changes, how = options.settings(assignments, backend, recompute=recompute)
    changes |= {
        name: value
        for name, value in (("model", model), ("precision", precision))
        if value is not None
    }
    asked = load_recipe(recipe).replace(**changes)
    memory_bytes = _memory_bytes(how, memory_gb)
    if not as_json:
        print(
            f"{shown_model(asked)} in {asked.precision} at {asked.image_size} px on {how.backend}"
        )
    found = find_batch(
        asked,
        how,
        memory_bytes=memory_bytes,
        first=start,
        listener=_ignore if as_json else lambda done: print(line(done)),
    )
    if as_json:
        print_json(found.fields() | {"memory_bytes": memory_bytes})
        return
    defaults = type(how)().fields()
    given = [f"{name}={value}" for name, value in changes.items()]
    given += [
        f"{name}={value}"
        for name, value in how.fields().items()
        if name in _KEPT and value != defaults[name]
    ]
    for each in advice(recipe, asked, how, found, given):
        print(each)


def shown_model(recipe: "Recipe") -> str:
    """Return a model's name, or what it is if it has none."""
    return recipe.model if isinstance(recipe.model, str) else "a given model"


def line(done: "Try") -> str:
    """Return the line of a try.

    >>> from lockstep.benchmark.largest_batch import Try
    >>> line(Try(64, 2, True, images_per_sec=11.26, peak_memory_bytes=3_100_000_000))
    '    64 images in 2 parts: fits, 11.3 images/s, main memory 3.1 GB'
    >>> line(Try(128, 1, False, "std::exception")), line(Try(128, 1, False, "no memory", is_short=True))
    ('   128 images: failed: std::exception', '   128 images: too large')
    """
    what = f"{done.images:>6} images{f' in {done.parts} parts' if done.parts > 1 else ''}"
    if not done.fits:
        return (
            f"{what}: too large"
            if done.is_short
            else f"{what}: failed: {(done.reason.splitlines() or ['?'])[0]:.100}"
        )
    speed = "" if done.images_per_sec is None else f", {done.images_per_sec:.1f} images/s"
    memory = (
        ""
        if done.peak_memory_bytes is None
        else f", main memory {done.peak_memory_bytes / GB:.1f} GB"
    )
    return f"{what}: fits{speed}{memory}"


def advice(
    name: str, recipe: "Recipe", how: "Execution", found: "Found", given: list[str]
) -> list[str]:
    """Return the last lines: the answer, and the command that trains the recipe's batch on this
    machine."""
    from lockstep.backends import FRAMEWORKS

    own = recipe.global_batch_images
    parts = found.parts
    given = [*given, *([f"accumulation_steps={parts}"] if parts > 1 else [])]
    sets = [word for each in given for word in ("--set", each)]
    named = [] if how.backend == DEFAULT_BACKEND else ["--backend", how.backend]
    command = shlex.join(
        ["lockstep", "train", "--recipe", name, *named, "--data", "DATA", "--out", "RUN", *sets]
    )
    at_once = "at once" if parts == 1 else f"in {parts} parts of {own // parts}"
    lines = [
        f"The largest batch that fits: {found.largest} images.",
        f"The recipe's {own} images fit {at_once}:",
        command,
    ]
    if how.recompute == "off" and FRAMEWORKS[how.backend].recomputes and parts > 1:
        lines.append("More fit, in steps that take longer, with --recompute blocks.")
    return lines


def _memory_bytes(how: "Execution", asked_gb: float | None) -> int | None:
    """Return what a process may allocate on a CPU. Raises `UserError` if it is not known, or asked
    for on a GPU."""
    from lockstep.system.errors import UserError
    from lockstep.system.machine import free_memory_bytes, gpu

    on_gpu = how.device != "cpu" and gpu() is not None
    if on_gpu and asked_gb is not None:
        raise UserError(
            "--memory-gb limits main memory, but the steps run on a GPU; leave it out, or add --set"
            " device=cpu"
        )
    found = free_memory_bytes() if asked_gb is None else int(asked_gb * GB)
    if found is None and not on_gpu:
        raise UserError(
            "this system does not report how much memory is free; say how much may be used:"
            " --memory-gb"
        )
    return found


def _ignore(done: "Try") -> None:
    pass


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    from lockstep.system.errors import EXIT_SAVED_AND_STOPPED, Interrupted

    raise Interrupted(f"stopped by {signal.Signals(number).name}", EXIT_SAVED_AND_STOPPED)
