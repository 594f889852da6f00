"""`lockstep runs`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import escape_line, print

app = typer.Typer(help="Look after finished runs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look after finished runs."""


@app.command("slim")
def slim(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs.")],
    newest: Annotated[
        bool, typer.Option("--keep-newest", help="Keep the newest checkpoint too.")
    ] = False,
) -> None:
    """Keep only the best checkpoint, without velocities.

    You can still predict, serve, evaluate, convert and report, but not resume.
    """
    from lockstep.runs.slim import slim_run

    for run in runs:
        kept, removed, freed, lost = slim_run(run, keeps_newest=newest)
        print(f"{run}: freed {freed / 1e6:.1f} MB; it cannot resume")
        print(f"  weights kept         step {', '.join(map(str, kept))}")
        print(f"  checkpoints removed  {', '.join(map(str, removed)) or 'none'}")
        if lost:
            print(f"  note: {escape_line(lost)}")
