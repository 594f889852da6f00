"""`lockstep launch`."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import print, print_table
from lockstep.launch import ssh
from lockstep.launch.job import Job, read_time
from lockstep.launch.launcher import LOCKSTEP, Starting, Watch, launch_ranks
from lockstep.launch.nodes import Start, Table, one_machine
from lockstep.launch.ray import RayLaunch, launch_on_ray
from lockstep.launch.rendezvous import Link, agree, meet
from lockstep.launch.rendezvous_address import STDIN, Options, find_meeting
from lockstep.system.errors import UserError
from lockstep.system.rank_variables import slurm_step

if TYPE_CHECKING:
    from lockstep.recipes import Execution

LEAST_PATIENCE = 5.0
"""Seconds. A shorter silence can be that of a busy machine."""
DEFAULT_PATIENCE = 120.0
"""Seconds."""
Processes = Annotated[
    int, typer.Option("-n", help="Processes per machine, one for each GPU.", min=1)
]
Backend = Annotated[
    str | None, typer.Option(metavar="NAME", help="Framework (default: the command's).")
]


def command(
    context: typer.Context,
    processes: Processes,
    backend: Backend = None,
    distributed: options.Distributed = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines, called nodes (default: Slurm's, else 1).", min=1)
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Number of this machine, from 0 (default: Slurm's).", min=0),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of node 0 (default: Slurm's)."),
    ] = None,
    bind: Annotated[
        str | None,
        rare(
            metavar="ADDRESS|INTERFACE",
            help="Listen only here (default: the address that reaches node 0).",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Secret that all machines share; - reads it from stdin."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...", help="Also start these machines over ssh; this one is node 0."
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="End all ranks if one is silent for this long.",
            min=LEAST_PATIENCE,
        ),
    ] = DEFAULT_PATIENCE,
    restarts: Annotated[
        int, typer.Option(help="Restart all ranks after a failure, at most N times.", min=0)
    ] = 0,
    scheduler: Annotated[
        str | None,
        typer.Option("--on", metavar="ray", help="Launch on the nodes of a Ray cluster."),
    ] = None,
    address: Annotated[
        str | None,
        rare(metavar="HOST:PORT", help="With --on ray: head of the cluster (default: this one's)."),
    ] = None,
    gpus: Annotated[
        int | None, rare(help="With --on ray: GPUs per machine (default: -n).", min=0)
    ] = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the table of ranks; start none.")
    ] = False,
) -> None:
    """Run a command in several processes, one for each GPU.

    Several machines: docs/how-to/many-machines.md

    Example: lockstep launch -n 2 -- train --recipe demo --data DATA --out RUN
    """
    from lockstep import backends

    if not context.args:
        raise UserError(
            "nothing to launch; expected a command after --, such as: lockstep launch -n 2 --"
            " train ..."
        )
    fields = {"backend": backend, "distributed": distributed}
    arguments = add_options(context.args, fields)
    settled = options.settle_command(context, arguments)
    _refuse_conflicts(fields, settled.execution)
    if is_dry:
        _print_ranks(processes, nodes, hosts.split(",") if hosts else [], settled.out)
        return
    if scheduler is not None:
        here = (rendezvous, bind, secret_file, hosts, node_rank)
        _refuse_here(scheduler, dict(zip(_HERE, here, strict=True)))
        job = make_job("lockstep", nodes or 1, processes, gpus, arguments, patience, restarts)
        launch = RayLaunch(job, address, settled.out)
        raise typer.Exit(launch_on_ray(launch, lambda text: print(text, file=sys.stderr)))
    options.switch_environment(settled.execution.backend)
    framework = backends.load(settled.execution.backend)
    others = tuple(hosts.split(",")) if hosts else ()
    meeting_options = Options(nodes, node_rank, rendezvous, bind, secret_file, others)
    with ExitStack() as stack:
        logs = stack.enter_context(make_logs(settled.out))
        watch = Watch(patience, restarts, logs, lambda text: print(text, file=sys.stderr))
        start = partial(framework.prepare_ranks, distributed=settled.execution.distributed)
        machines = _connect(start, processes, meeting_options, watch, arguments)
        starting, link = stack.enter_context(machines)
        code = launch_ranks([*LOCKSTEP, *arguments], starting, link, watch)
    raise typer.Exit(code)


_HERE = ("rendezvous", "bind", "secret-file", "hosts", "node-rank")
"""Options that set where machines meet; Ray sets this itself."""


def _refuse_here(scheduler: str, values: Mapping[str, object]) -> None:
    """Raise `UserError` for options that `--on` cannot use, or a scheduler other than Ray."""
    if scheduler != "ray":
        raise UserError(
            f"--on is {scheduler}, expected ray; lockstep submit prints jobs for others"
        )
    for name, value in values.items():
        if value is not None:
            raise UserError(
                f"--{name} does not apply to --on ray, which knows its nodes; leave it out"
            )


def make_job(
    name: str,
    nodes: int,
    processes: int,
    gpus: int | None,
    arguments: Sequence[str],
    patience: float,
    restarts: int,
    time: str | None = None,
) -> Job:
    """Return what a scheduler gets. `time` is the limit, as text."""
    launch = []
    if patience != DEFAULT_PATIENCE:
        launch += ["--patience", f"{patience:g}"]
    if restarts:
        launch += ["--restarts", str(restarts)]
    devices = processes if gpus is None else gpus
    seconds = None if time is None else read_time(time)
    return Job(name, nodes, processes, tuple(arguments), tuple(launch), seconds, devices)


def _print_ranks(processes: int, nodes: int | None, hosts: Sequence[str], out: Path | None) -> None:
    """Print a row for each rank that would start."""
    from lockstep.runs.folder import LOGS

    step = slurm_step(os.environ)
    names = ["this machine", *hosts] if hosts else [""] * (nodes or (step.nodes if step else 1))
    rows = [("rank", "node", "machine", "local rank", "output")]
    for node, name in enumerate(names):
        for local_rank in range(processes):
            rank = node * processes + local_rank
            folder = "a temporary folder" if out is None else str(out / LOGS)
            output = f"{folder}/rank-{rank}.log" if rank else "here"
            rows.append((str(rank), str(node), name, str(local_rank), output))
    print_table(rows if hosts else [(row[0], row[1], *row[3:]) for row in rows])


def add_options(arguments: Sequence[str], values: Mapping[str, str | None]) -> list[str]:
    """Return a command line with these options inserted before its own, which take precedence.
    Options without a value are left out."""
    first = 0
    while first < len(arguments) and not arguments[first].startswith("-"):
        first += 1
    options: list[str] = []
    for name, value in values.items():
        if value is not None:
            options += [f"--{name}", value]
    return [*arguments[:first], *options, *arguments[first:]]


def _refuse_conflicts(values: Mapping[str, str | None], execution: "Execution") -> None:
    """Raise `UserError` if the launched command sets other values than `launch` does."""
    for name, value in values.items():
        settled = getattr(execution, name)
        if value is not None and value != settled:
            raise UserError(
                f"launch --{name} is {value}, but the command after -- says {settled}; give only"
                " one of them"
            )


@contextmanager
def _connect(
    start: Callable[[Table], AbstractContextManager[Start]],
    processes: int,
    meeting_options: Options,
    watch: Watch,
    arguments: list[str],
) -> Iterator[tuple[Starting, Link | None]]:
    """Once the machines have met, yield how to start ranks, and the link to the other machines if
    there are any. `start` starts this machine's ranks of a table."""
    meeting = find_meeting(meeting_options, os.environ)
    if str(meeting_options.secret_file) == STDIN:
        ssh.end_with_input()
    if meeting is None:
        yield lambda: start(one_machine(processes)), None
        return
    with ExitStack() as stack:
        check = None
        if meeting_options.hosts:
            how = (arguments, watch.patience_sec, watch.restarts)
            job = make_job("lockstep", meeting.nodes, processes, None, *how)
            place = f"{meeting.host}:{meeting.port}"
            commands = [job.list_arguments(node, place) for node in range(1, meeting.nodes)]
            check = stack.enter_context(
                ssh.launch_over_ssh(meeting_options.hosts, commands, meeting.secret)
            ).refuse_loss
        link, address = stack.enter_context(meet(meeting, watch.patience_sec / 2, check))
        yield (
            lambda: start(agree(link, meeting, address, processes, arguments)),
            link,
        )


@contextmanager
def make_logs(out: Path | None) -> Iterator[Path | None]:
    """Yield the folder for the output of ranks, in the folder of the run that they train.

    Yield None if they train no run, or if its folder contains other things. If no run begins, the
    folder is removed again.
    """
    from lockstep.runs.folder import LOGS, list_other_things

    if out is None or list_other_things(out):
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
