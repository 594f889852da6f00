"""`lockstep launch`."""

from typing import Annotated

import typer

from lockstep.cli import options


def command(
    context: typer.Context,
    processes: Annotated[int, typer.Option("-n", help="Processes on this machine, one for each GPU.", min=1)],
    backend: options.Backend = "torch",
) -> None:
    """Run a command in several processes under the framework's launcher: `lockstep launch -n 2 -- train ...`."""
    from lockstep import backends
    from lockstep.errors import UserError

    if not context.args:
        raise UserError("nothing to launch; expected a command behind --, such as: lockstep launch -n 2 -- train ...")
    raise typer.Exit(backends.load(backend).launch(processes, context.args))
