"""`lockstep report`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import print


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Runs, finished or not; or one file of `lockstep benchmark -o`."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Also write each figure into this folder, as PNG and SVG."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show which parts of misclassified images support the wrong class (Grad-CAM).",
        ),
    ] = False,
) -> None:
    """Write one HTML page about runs, or about a benchmark.

    Shows curves, accuracy, confusion, calibration, mistakes, speed and recipe; for a benchmark, the
    roofline and all cells.
    """
    if any(run.is_file() for run in runs):
        from lockstep.benchmark.page import write_page

        if len(runs) > 1 or explain:
            raise typer.BadParameter(
                "a benchmark report makes its own page; name it alone, without --explain"
            )
        for written in write_page(runs[0], out, plots):
            print(written)
        return
    from lockstep import report

    print(report(runs, out, plots=plots, explain=explain))
    if plots is not None:
        print(plots)
