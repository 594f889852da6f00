"""`lockstep submit`: submit a command to a scheduler."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.launch import (
    DEFAULT_PATIENCE,
    LEAST_PATIENCE,
    Backend,
    Processes,
    add_options,
    make_job,
)
from lockstep.cli.terminal import print
from lockstep.launch.job import name_runs
from lockstep.system.errors import UserError

app = typer.Typer(help="Submit a command to a scheduler.", no_args_is_help=True)

_PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
Nodes = Annotated[int, typer.Option(help="Machines, called nodes.", min=1)]
Time = Annotated[
    str | None, typer.Option(metavar="H:MM:SS", help="Time limit, such as 4:00:00 or 2-00:00:00.")
]
Name = Annotated[str, typer.Option(metavar="NAME", help="Name of the job.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs per machine (default: -n; 0: none).", min=0)]
Patience = Annotated[
    float,
    rare(metavar="SECONDS", help="As for `lockstep launch`.", min=LEAST_PATIENCE),
]
Restarts = Annotated[
    int, typer.Option(help="Restart all ranks after a failure, at most N times.", min=0)
]
Now = Annotated[bool, typer.Option("--now", help="Submit the job instead of printing it.")]


@app.command("slurm", context_settings=_PASSES_ON)
def slurm(
    context: typer.Context,
    processes: Processes,
    nodes: Nodes = 1,
    time: Time = None,
    name: Name = "lockstep",
    gpus: Gpus = None,
    cpus: Annotated[
        int | None, rare(help="Processors per machine (default: Slurm's).", min=1)
    ] = None,
    tasks: Annotated[
        str, rare(metavar="NAME", help="A task is a node (with a launcher) or a rank.")
    ] = "node",
    saving: Annotated[
        int, rare(help="Save and stop N seconds before the time limit.", min=1)
    ] = 300,
    recipes: Annotated[
        str | None,
        typer.Option(metavar="RECIPE,...", help="Submit an array of jobs, one per recipe."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the runs of --recipes."),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Option of sbatch, such as --sbatch=--qos=low; repeatable."
        ),
    ] = None,
    backend: Backend = None,
    patience: Patience = DEFAULT_PATIENCE,
    restarts: Restarts = 0,
    now: Now = False,
) -> None:
    """Print a batch script for Slurm, or submit it.

    Example: lockstep submit slurm --nodes 4 -n 8 --time 4:00:00 -- train --data DATA --out RUN
    """
    from lockstep.launch import slurm as scheduler

    if (recipes is None) != (runs is None):
        raise UserError("--recipes A,B and --runs FOLDER need each other; give both or neither")
    if tasks not in scheduler.TASKS:
        raise typer.BadParameter(f"expected {' or '.join(scheduler.TASKS)}", param_hint="--tasks")
    named = name_runs(recipes.split(","), runs) if recipes and runs else {}
    command = _read_command(context, backend)
    job = make_job(name, nodes, processes, gpus, command, patience, restarts, time)
    for extra in [["--recipe", recipe, "--out", str(run)] for recipe, run in named.items()] or [[]]:
        # Better an error here than in the queue.
        run = options.settle_command(context, [*job.command, *extra]).out
    about = scheduler.Slurm(tasks, cpus, saving, tuple(sbatch or ()), named)
    _show(scheduler.write_script(job, about, run), scheduler.submit, is_wanted=now)


def _read_command(context: typer.Context, backend: str | None) -> list[str]:
    """Return the command after --. Raises `UserError` if there is none."""
    if not context.args:
        raise UserError(
            "nothing to submit; expected a command after --, such as: lockstep submit slurm -n 8"
            " -- train ..."
        )
    return add_options(context.args, {"backend": backend})


@app.command("ray", context_settings=_PASSES_ON)
def ray(
    context: typer.Context,
    processes: Processes,
    nodes: Nodes = 1,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The cluster's dashboard (default: RAY_ADDRESS)."),
    ] = None,
    gpus: Gpus = None,
    backend: Backend = None,
    patience: Patience = DEFAULT_PATIENCE,
    restarts: Restarts = 0,
    now: Now = False,
) -> None:
    """Print a script that submits a job to Ray, or run it.

    Example: lockstep submit ray --nodes 4 -n 8 -- train --data DATA --out RUN
    """
    from lockstep.launch import ray as scheduler

    command = _read_command(context, backend)
    options.settle_command(context, command)
    job = make_job("lockstep", nodes, processes, gpus, command, patience, restarts)
    _show(scheduler.write_script(job, address), scheduler.submit, is_wanted=now)


@app.command("kubernetes", context_settings=_PASSES_ON)
def kubernetes(
    context: typer.Context,
    processes: Processes,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with Lockstep.")],
    nodes: Nodes = 1,
    form: Annotated[
        str, typer.Option(metavar="NAME", help="job (indexed), jobset, trainjob or pytorchjob.")
    ] = "job",
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            metavar="CLAIM:/PATH",
            help="Claim for all Pods to mount, such as data:/data; repeatable.",
        ),
    ] = None,
    time: Time = None,
    name: Name = "lockstep",
    gpus: Gpus = None,
    backend: Backend = None,
    patience: Patience = DEFAULT_PATIENCE,
    restarts: Restarts = 0,
    now: Now = False,
) -> None:
    """Print a manifest for Kubernetes, or submit it.

    Example: lockstep submit kubernetes --nodes 4 -n 8 --image IMAGE --volume data:/data
    --volume runs:/runs -- train --recipe RECIPE --data /data --out /runs/first
    """
    from lockstep.launch import kubernetes as scheduler

    if form not in scheduler.FORMS:
        raise typer.BadParameter(f"expected {', '.join(scheduler.FORMS)}", param_hint="--form")
    command = _read_command(context, backend)
    _parse(context, command)
    cluster = scheduler.Cluster(image, form, scheduler.read_volumes(volumes or []))
    job = make_job(name, nodes, processes, gpus, command, patience, restarts, time)
    # Through JSON: YAML would replace a repeated part by a reference.
    objects = json.loads(json.dumps(scheduler.write_manifest(job, cluster), allow_nan=False))
    text = f"# kubectl create secret generic {name} --from-file={scheduler.SECRET}=FILE\n"
    text += yaml.safe_dump_all(objects, sort_keys=False, width=1000)
    _show(text, lambda manifest: scheduler.submit(manifest, name), is_wanted=now)


def _parse(context: typer.Context, arguments: Sequence[str]) -> None:
    """Raise an error if a command has unknown options. Its files may be elsewhere."""
    commands = context.find_root().command
    name, command, rest = commands.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
    command.make_context(name, rest, parent=context.find_root())


def _show(text: str, submit: Callable[[str], str], *, is_wanted: bool) -> None:
    """Print what a scheduler gets, or submit it and print the answer."""
    print(submit(text) if is_wanted else text, end="\n" if is_wanted else "")
