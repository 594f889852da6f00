"""`lockstep runs`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.hints import Command
from lockstep.cli.terminal import escape_line, print

app = typer.Typer(help="Look after finished runs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look after finished runs."""


@app.command("slim", cls=Command)
def slim(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or of runs of folds."),
    ],
    newest: Annotated[
        bool, typer.Option("--keep-newest", help="Keep the newest checkpoint too.")
    ] = False,
) -> None:
    """Keep the best checkpoint alone, without velocities.

    Predicting, serving, evaluating, converting and reports work as before. The run cannot resume.
    """
    from lockstep.runs.folds import list_runs
    from lockstep.runs.slim import slim_run

    for folder in runs:
        for run in list_runs(folder) or [folder]:
            result = slim_run(run, keeps_newest=newest)
            kept = ", ".join(map(str, result.kept))
            print(
                f"{run}: freed {result.freed_bytes / 1e6:.1f} MB; keeps the weights of step {kept}"
            )
            if result.removed:
                print(f"  removed: the checkpoints of steps {', '.join(map(str, result.removed))}")
            for remark in result.remarks:
                print(f"  note: {escape_line(remark)}")
            print(
                "  It cannot resume. A new run can start from its weights: lockstep train --weights"
                f" {shlex.quote(str(run))} --data DATA --out ANOTHER"
            )
