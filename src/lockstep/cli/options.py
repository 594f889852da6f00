"""Options that several commands share."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lockstep.cli.command import rare
from lockstep.cli.terminal import print, show_download
from lockstep.system.errors import (
    EXIT_SAVED_AND_STOPPED,
    BackendError,
    Interrupted,
    RecipeError,
    UserError,
)

if TYPE_CHECKING:
    from lockstep.inference.model import Model as LoadedModel
    from lockstep.recipes import Execution
    from lockstep.runs.events import Event
    from lockstep.runs.resuming import RunSettings
    from lockstep.weights import WeightsChoice

Backend = Annotated[
    str, typer.Option(metavar="NAME", help="Framework; `lockstep doctor` lists them.")
]
UnknownBelow = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Unknown below this probability (default: the checkpoint's; 0: never).",
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help=(
            "native (default), auto (the fastest) or a runtime of `lockstep doctor`; for an ONNX"
            " export, by default the one that is installed."
        ),
    ),
]
RequireSignature = Annotated[
    Path | None,
    rare(metavar="KEY", help="Load only what this public key, or certificate (PEM), signed."),
]
Sign = Annotated[
    Path | None,
    rare("--sign", exists=True, metavar="KEY", help="Sign the result, as `lockstep sign` does."),
]
Loader = Annotated[
    str | None, rare(metavar="NAME", help="Image loader: host, dali, dali-gpu or synthetic.")
]
Distributed = Annotated[
    str | None, rare(metavar="NAME", help="Communication library: native or horovod.")
]
_set = partial(typer.Option, "--set", metavar="FIELD=VALUE")
Set = Annotated[
    list[str] | None, _set(help="Set a field that `lockstep recipes fields` lists; repeatable.")
]
SetForWeights = Annotated[
    list[str] | None,
    _set(help="Set preprocessing (image_size=160), precision or execution; repeatable."),
]
SetPreprocessing = Annotated[
    list[str] | None,
    _set(help="Set and store preprocessing, such as image_size=160; repeatable."),
]
AsRecipe = Annotated[
    str | None,
    rare(
        "--recipe",
        metavar="RECIPE",
        help="Prepare images as in this recipe; --set takes precedence.",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="newest, best or a step (default: best, if evaluated)."),
]


def _check_model(text: str | None) -> str | None:
    """Return a text that describes a network. Raises an error for any other text, before anything
    is read or downloaded."""
    if text is not None:
        from lockstep.weights import WeightsChoice

        WeightsChoice(model=text)
    return text


Model = Annotated[
    str | None,
    rare(
        metavar="NAME|FIELDS",
        callback=_check_model,
        help="Network of the weights, such as resnet50-v1 (docs/how-to/model.md).",
    ),
]
Ignore = Annotated[
    list[str] | None,
    rare(metavar="GLOB", help="Ignore a file's tensors, such as 'criterion.*'; repeatable."),
]
Batch = Annotated[int, rare(help="Images per batch, on each rank.", min=1)]
RECIPE = "A published recipe, a YAML file or a run"
Recipe = Annotated[str, typer.Option(metavar="RECIPE", help=f"{RECIPE}.")]
RecipeOrNone = Annotated[
    str | None,
    typer.Option("--recipe", metavar="RECIPE", help=f"{RECIPE} (default: as train)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WEIGHTS = "A run, a checkpoint, a file of weights or a name (`lockstep weights`)"


def find_weights(name: str) -> Path:
    """Return the path of weights. Remote ones are downloaded, with a progress bar."""
    from lockstep.weights.hub import fetch_weights, is_remote

    if not is_remote(name):
        return Path(name)
    with show_download(name) as progress:
        return fetch_weights(name, progress=progress)


def choose_weights(
    name: str,
    checkpoint: str | None = None,
    ema: bool | None = None,
    model: str | None = None,
    ignore: list[str] | None = None,
) -> "WeightsChoice":
    """Return the weights that options choose. Remote ones are downloaded."""
    from lockstep.weights import WeightsChoice

    return WeightsChoice(find_weights(name), checkpoint, ema, model, ignore=tuple(ignore or ()))


def load_model(
    name: str, model: str | None, ignore: list[str] | None, **choice: Any
) -> "LoadedModel":
    """Return the model that options choose; `choice` has more arguments of `lockstep.load`. Remote
    weights are downloaded."""
    from lockstep import load

    return load(find_weights(name), network=model, ignore=ignore or (), **choice)


def sign_target(target: Path, key: Path | None) -> None:
    """Sign what a command wrote if there is a key. Raises `UserError` for a prefix."""
    from lockstep import sign

    if key is not None and not target.exists():
        raise UserError(
            f"{target} is the prefix of several files; sign their folder: lockstep sign"
        )
    for path in sign(target, key) if key is not None else ():
        print(f"wrote {path}")


WeightsArgument = Annotated[str, typer.Argument(help=f"{WEIGHTS}.", show_default=False)]


def choose_start(
    name: str | Path | None, model: str | None, ignore: list[str] | None, settings: "RunSettings"
) -> "WeightsChoice | None":
    """Return the weights that a run starts from; None without a name. Errors of the data come
    before a download. Raises `UserError` for options on reading weights if there are none."""
    if name is None and (model or ignore):
        raise UserError(
            "--model and --ignore say how --weights are read; add --weights, or set the network of"
            " the run with --set model=NAME"
        )
    if name is None:
        return None
    from lockstep.weights.hub import is_remote

    if is_remote(name):
        from lockstep.runs.opening import check_paths

        check_paths(settings, None)
    return choose_weights(str(name), model=model, ignore=ignore)


Ema = Annotated[
    bool | None,
    rare(
        "--ema/--no-ema",
        help="Use the moving average of the weights (default: if it was better).",
    ),
]
Classes = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Class names, one per line or .json (default: the weights' names)."
    ),
]


def read_settings(
    assignments: list[str] | None, backend: str, **options: Any
) -> tuple[dict[str, Any], Any]:
    """Return the changes of the recipe, and the execution. `options` are execution fields; those
    that are None are not set."""
    from lockstep.recipes import Execution

    changes, values = read_fields(assignments, backend=backend, **options)
    execution = Execution.of(values)
    prepare(execution)
    return changes, execution


def read_fields(
    assignments: list[str] | None, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the recipe and of the execution that are set.

    `options` are execution fields; those that are None are not set.
    """
    from lockstep.recipes import parse_settings

    changes, execution = parse_settings(assignments or [])
    values = {name: value for name, value in options.items() if value is not None}
    return changes, values | execution


class CommandSettled(Exception):
    """A command has settled its execution; `settle_command` ends it here."""

    def __init__(self, execution: "Execution", out: Path | None) -> None:
        self.execution = execution
        self.out = out
        """The folder of the run that the command trains; None if it trains none."""


_stops_when_settled = False


def settle_command(context: typer.Context, arguments: Sequence[str]) -> CommandSettled:
    """Run a command line of Lockstep until it has settled its execution, and return that.

    Raises `typer.Exit` if the command ends before, for example after `--help`.
    """
    global _stops_when_settled
    _stops_when_settled = True
    root: Any = context.find_root()
    try:
        code = root.command.main(list(arguments), prog_name=root.info_name, standalone_mode=False)
    except CommandSettled as settled:
        return settled
    finally:
        _stops_when_settled = False
    raise typer.Exit(code or 0)


def prepare(execution: "Execution", out: Path | None = None) -> None:
    """Run the command with the Python that has its backend, in a process that knows its rank.

    `out` is the folder of the run that the command trains.
    """
    from lockstep.backends.frameworks import name_rank

    if _stops_when_settled:
        raise CommandSettled(execution, out)
    switch_environment(execution.backend)
    name_rank(execution.backend)  # before anything is printed: only rank 0 prints


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP act as Ctrl-C does: workers stop, and results are kept."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(f"stopped by {signal.Signals(number).name}", EXIT_SAVED_AND_STOPPED)


def show_note(event: "Event") -> None:
    """Print an event on standard error if it is a note, so that standard output stays
    machine-readable."""
    if event["kind"] == "note":
        print(f"note: {event['message']}", file=sys.stderr)


def parse_profile(text: str | None) -> dict[str, int]:
    """Return the fields of an execution that `--profile N[:M]` sets."""
    if text is None:
        return {}
    first, _, count = text.partition(":")
    try:
        return {"profile_step": int(first), "profile_steps": int(count or 1)}
    except ValueError:
        raise RecipeError(f"--profile takes N or N:M, such as 20:3; found {text!r}") from None


_WENT = "LOCKSTEP_WENT_WHERE_INSTALLED"
"""Environment variable that is set when a command moves to another Python, so that it moves only
once."""


def switch_environment(backend: str) -> None:
    """Run this command line with the Python that has a backend, if this Python does not have it and
    another one is found.

    The process stays the same: output, exit code and signals are those of the command. Raises
    `BackendError` if that Python has no Lockstep.
    """
    from lockstep import backends

    framework = backends.FRAMEWORKS.get(backend)
    if framework is None or framework.version() is not None or _WENT in os.environ:
        return
    python = backends.find_interpreter(backend)
    if python is None:
        return
    importing = [str(python), "-P", "-c", "import lockstep"]
    if subprocess.run(importing, capture_output=True, check=False).returncode:
        raise BackendError(
            f"{python} cannot import lockstep, but must run --backend {backend}; install lockstep"
            " there"
        )
    os.environ[_WENT] = backend
    sys.stdout.flush()
    # -P: nothing is imported from this folder
    os.execv(python, [str(python), "-P", "-m", "lockstep", *sys.argv[1:]])


def read_inference_options(
    assignments: list[str] | None, backend: str, like: str | None = None, **options: str | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return precision and execution, and the preprocessing, None if it is not set. `like` names a
    recipe whose preprocessing is the starting point.

    The other fields of the recipe come with the weights; setting one raises `RecipeError`.
    """
    recipe, execution = read_settings(assignments, backend, **options)
    how = {"precision": recipe.pop("precision", None), "execution": execution}
    return how, _read_preprocessing(recipe, like)


def read_preprocessing(assignments: list[str] | None, like: str | None) -> dict[str, Any] | None:
    """Return the preprocessing to write; None if nothing is set. Raises `RecipeError` for all other
    fields."""
    recipe, execution = read_fields(assignments)
    others = [*execution]
    if "precision" in recipe:
        others.insert(0, "precision")
    if others:
        raise RecipeError(
            f"--set takes only preprocessing here, not {', '.join(others)}; set that for evaluate,"
            " predict or serve (export has --precision)"
        )
    return _read_preprocessing(recipe, like)


def _read_preprocessing(changes: dict[str, Any], like: str | None) -> dict[str, Any] | None:
    """Return the preprocessing of the recipe `like` with these changes; None if nothing is set."""
    from lockstep.recipes import load_recipe
    from lockstep.weights.preprocessing import check_preprocessing, read_evaluation

    changes = check_preprocessing(changes)
    if like is not None:
        changes = read_evaluation(load_recipe(like)) | changes
    return changes or None
