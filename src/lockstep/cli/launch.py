"""`lockstep launch`."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options


def command(
    context: typer.Context,
    processes: Annotated[int, typer.Option("-n", help="Processes on this machine, one for each GPU.", min=1)],
    backend: Annotated[str | None, typer.Option(help="Framework; by default that of the command.")] = None,
    distributed: Annotated[
        str | None, typer.Option(help="Library that adds up over ranks: native or horovod; by default that of the command.")
    ] = None,
) -> None:
    """Run a command in several processes, one for each GPU.

    Example: lockstep launch -n 2 -- train --recipe demo --data DATA --out RUN
    """
    from lockstep import backends
    from lockstep.recipes import Execution
    from lockstep.system.errors import UserError
    from lockstep.system.ranks import LOCKSTEP

    if not context.args:
        raise UserError("nothing to launch; expected a command after --, such as: lockstep launch -n 2 -- train ...")
    arguments = list(context.args)
    last = _last(arguments)
    found = {name: _agreed(name, value, arguments) for name, value in (("backend", backend), ("distributed", distributed))}
    how = Execution.of({name: value for name in found if (value := found[name] or last.get(name)) is not None})
    options.go_where_installed(how.backend)
    raise typer.Exit(backends.load(how.backend).launch(processes, [*LOCKSTEP, *arguments], how.distributed))


def _last(arguments: list[str]) -> dict[str, Any]:
    """Return the last execution of the run that a launched command resumes; empty if the command names a recipe."""
    from lockstep.runs.resuming import last_execution

    out = _said("out", arguments)
    return last_execution(Path(out)) if arguments[0] == "train" and out and _said("recipe", arguments) is None else {}


def _agreed(name: str, value: str | None, arguments: list[str]) -> str | None:
    """Return the value of a field from the launch or its command. If only the launch has it, add it to the command."""
    from lockstep.system.errors import UserError

    said = _said(name, arguments)
    if value is not None and said is not None and value != said:
        raise UserError(f"launch --{name} is {value}, but the command after -- says {said}; give only one of them")
    if value is not None and said is None:
        arguments += [f"--{name}", value]
    return value or said


def _said(name: str, arguments: list[str]) -> str | None:
    """Return the value of an execution's field in a command line: its last --set, else its last option."""
    given, settings = [], []
    for argument, following in pairwise([*arguments, ""]):
        option, equals, text = argument.partition("=")
        value = text if equals else following
        if option == f"--{name}":
            given.append(value)
        elif option == "--set" and value.startswith(f"{name}="):
            settings.append(value.removeprefix(f"{name}="))
    return [*given, *settings][-1] if given or settings else None
