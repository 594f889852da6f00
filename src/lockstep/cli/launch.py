"""`lockstep launch`."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import print

if TYPE_CHECKING:
    from lockstep.launch.launcher import Starting, Watch
    from lockstep.launch.meeting import Asked
    from lockstep.launch.rendezvous import Link

LEAST_PATIENCE = 5.0
"""Seconds. A shorter silence can be that of a busy machine."""


def command(
    context: typer.Context,
    processes: Annotated[
        int, typer.Option("-n", help="Processes on each machine, one for each GPU.", min=1)
    ],
    backend: Annotated[
        str | None, typer.Option(help="Framework; by default that of the command.")
    ] = None,
    distributed: Annotated[
        str | None,
        typer.Option(
            help=(
                "Library that adds up over ranks: native or horovod; by default that of the"
                " command."
            )
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Number of machines (nodes). Default: those of the Slurm step, else 1.", min=1
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Number of this machine, from 0. Default: that of Slurm.", min=0),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the machines meet: node 0's address. Default: that of Slurm.",
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|INTERFACE",
            help=(
                "Where this machine listens, and nowhere else. Default: its address on the way to"
                " node 0."
            ),
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The secret that all machines share; - reads it from standard input.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="Other machines. They are started over ssh, and this one is node 0.",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life or a batch after which ranks are ended.",
            min=LEAST_PATIENCE,
        ),
    ] = 120.0,
    restarts: Annotated[
        int,
        typer.Option(help="Start all ranks again after a failure, at most this many times.", min=0),
    ] = 0,
) -> None:
    """Run a command in several processes, one for each GPU.

    Example: lockstep launch -n 2 -- train --recipe demo --data DATA --out RUN

    On several machines: docs/many-machines.md
    """
    from lockstep import backends
    from lockstep.launch.launcher import LOCKSTEP, Watch, launch_ranks
    from lockstep.launch.meeting import Asked
    from lockstep.recipes import Execution
    from lockstep.system.errors import UserError

    if not context.args:
        raise UserError(
            "nothing to launch; expected a command after --, such as: lockstep launch -n 2 --"
            " train ..."
        )
    arguments = list(context.args)
    last = _last(arguments)
    found = {
        name: _agreed(name, value, arguments)
        for name, value in (("backend", backend), ("distributed", distributed))
    }
    how = Execution.of(
        {name: value for name in found if (value := found[name] or last.get(name)) is not None}
    )
    options.go_where_installed(how.backend)
    engine = backends.load(how.backend)
    asked = Asked(
        nodes, node_rank, rendezvous, bind, secret_file, tuple(hosts.split(",")) if hosts else ()
    )
    with ExitStack() as stack:
        logs = stack.enter_context(logs_of(arguments))
        watch = Watch(patience, restarts, logs, lambda text: print(text, file=sys.stderr))
        machines = _machines(engine, how.distributed, processes, asked, watch, arguments)
        starting, link = stack.enter_context(machines)
        code = launch_ranks([*LOCKSTEP, *arguments], starting, link, watch)
    raise typer.Exit(code)


@contextmanager
def _machines(
    engine: Any,
    distributed: str,
    processes: int,
    asked: "Asked",
    watch: "Watch",
    arguments: list[str],
) -> "Iterator[tuple[Starting, Link | None]]":
    """Yield how ranks are started, once the machines have met, and the link to the other machines
    if there are any."""
    from lockstep.launch import ssh
    from lockstep.launch.meeting import STDIN, meeting_of
    from lockstep.launch.nodes import one_machine
    from lockstep.launch.rendezvous import agree, met

    meeting = meeting_of(asked, os.environ)
    if meeting is None:
        yield lambda: engine.prepare_ranks(one_machine(processes), distributed), None
        return
    with ExitStack() as stack:
        check = None
        if asked.hosts:
            command = ssh.follower(meeting, processes, watch, arguments)
            check = stack.enter_context(
                ssh.launched_over_ssh(asked.hosts, command, meeting.secret)
            ).refuse_loss
        elif str(asked.secret_file) == STDIN:
            ssh.end_with_input()
        link, address = stack.enter_context(met(meeting, watch.patience_sec / 2, check))
        yield (
            lambda: engine.prepare_ranks(
                agree(link, meeting, address, processes, arguments), distributed
            ),
            link,
        )


@contextmanager
def logs_of(arguments: list[str]) -> Iterator[Path | None]:
    """Yield the folder for the output of the ranks of a launched command: in the folder of the run
    that it trains.

    Yield None if it trains none, or in a folder with other things. If no run begins, the folder is
    removed again.
    """
    from lockstep.runs.folder import LOGS, RunFolder

    out = Path(_said("out", arguments) or "") if arguments[0] == "train" else Path()
    if out == Path() or RunFolder.others_in(out):
        yield None
        return
    is_new = not out.exists()
    try:
        yield out / LOGS
    finally:
        if is_new and not (out / "recipe.yaml").exists():
            shutil.rmtree(out / LOGS, ignore_errors=True)
            with suppress(OSError):  # it holds something else
                out.rmdir()


def _last(arguments: list[str]) -> dict[str, Any]:
    """Return the last execution of the run that a launched command resumes; empty if the command
    names a recipe."""
    from lockstep.runs.resuming import last_execution

    out = _said("out", arguments)
    return (
        last_execution(Path(out))
        if arguments[0] == "train" and out and _said("recipe", arguments) is None
        else {}
    )


def _agreed(name: str, value: str | None, arguments: list[str]) -> str | None:
    """Return the value of a field from the launch or its command. If only the launch has it, add it
    to the command."""
    from lockstep.system.errors import UserError

    said = _said(name, arguments)
    if value is not None and said is not None and value != said:
        raise UserError(
            f"launch --{name} is {value}, but the command after -- says {said}; give only one of"
            " them"
        )
    if value is not None and said is None:
        arguments += [f"--{name}", value]
    return value or said


def _said(name: str, arguments: list[str]) -> str | None:
    """Return the value of an execution's field in a command line: its last --set, else its last
    option."""
    given = []
    settings = []
    for argument, following in pairwise([*arguments, ""]):
        option, equals, text = argument.partition("=")
        value = text if equals else following
        if option == f"--{name}":
            given.append(value)
        elif option == "--set" and value.startswith(f"{name}="):
            settings.append(value.removeprefix(f"{name}="))
    return [*given, *settings][-1] if given or settings else None
