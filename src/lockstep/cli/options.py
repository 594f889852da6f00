"""Options that several commands share."""

import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from lockstep.cli.terminal import print

Backend = Annotated[str, typer.Option(help="Framework: see `lockstep doctor`.")]
Loader = Annotated[str | None, typer.Option(help="What decodes the images: host, dali, dali-gpu or synthetic.")]
Distributed = Annotated[str | None, typer.Option(help="What adds up over ranks: native or horovod.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe or execution; may be repeated."),
]
Which = Annotated[str, typer.Option("--checkpoint", help="Of a run: newest, best or a step's number.")]
Ema = Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")]


def settings(assignments: list[str] | None, backend: str, **options: Any) -> tuple[dict[str, Any], Any]:
    """Return the changes of the recipe, and the execution; `options` are fields of it, None if not given."""
    from lockstep.recipes import Execution

    recipe, given = fields(assignments, backend=backend, **options)
    how = Execution.of(given)
    prepare(how.backend)
    return recipe, how


def fields(assignments: list[str] | None, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that are given of the recipe and of the execution; `options` are some of the latter, None if not."""
    from lockstep.recipes import parse_settings

    recipe, execution = parse_settings(assignments or [])
    return recipe, {name: value for name, value in options.items() if value is not None} | execution


def prepare(backend: str) -> None:
    """Have the command carried out where a backend is installed, by a process that knows its rank."""
    from lockstep.backends.frameworks import name_rank

    go_where_installed(backend)
    name_rank(backend)  # before anybody speaks: only rank 0 does


def show_note(event: dict[str, Any]) -> None:
    """Print the notes among the events of a command on standard error, so that what it prints stays machine-readable."""
    if event["kind"] == "note":
        print(f"note: {event['message']}", file=sys.stderr)


def traced_steps(text: str | None) -> dict[str, int]:
    """Return the fields of an execution that `--profile N[:M]` says."""
    from lockstep.system.errors import RecipeError

    if text is None:
        return {}
    first, _, count = text.partition(":")
    try:
        return {"profile_step": int(first), "profile_steps": int(count or 1)}
    except ValueError:
        raise RecipeError(f"--profile takes N or N:M, such as 20:3; found {text!r}") from None


_WENT = "LOCKSTEP_WENT_WHERE_INSTALLED"
"""Environment variable: set once a command has gone to another Python, which is asked for nothing more than once."""


def go_where_installed(backend: str) -> None:
    """Have this process carry out its command line with the Python that has a backend, if its own has not and one is found.

    It stays the same process: output, exit code and signals are those of the command. Raises `BackendError` if that Python
    has no Lockstep.
    """
    from lockstep import backends
    from lockstep.system.errors import BackendError

    framework = backends.FRAMEWORKS.get(backend)
    if framework is None or framework.version() is not None or _WENT in os.environ:
        return
    python = backends.interpreter(backend)
    if python is None:
        return
    if subprocess.run([python, "-P", "-c", "import lockstep"], capture_output=True, check=False).returncode:
        raise BackendError(f"{python} is to carry out --backend {backend}, but cannot import lockstep; install it there")
    os.environ[_WENT] = backend
    sys.stdout.flush()
    os.execv(python, [str(python), "-P", "-m", "lockstep", *sys.argv[1:]])  # -P: nothing is imported from this folder


def for_inference(assignments: list[str] | None, backend: str, **options: str | None) -> dict[str, Any]:
    """Return precision and execution; other fields of a recipe are refused, since the recipe comes with the weights."""
    from lockstep.system.errors import RecipeError

    recipe, execution = settings(assignments, backend, **options)
    precision = recipe.pop("precision", None)
    if recipe:
        raise RecipeError(
            f"{', '.join(recipe)}: the recipe comes with the weights; only precision and fields of the execution can be set"
        )
    return {"precision": precision, "execution": execution}
