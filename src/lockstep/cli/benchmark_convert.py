"""`lockstep benchmark convert`."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a benchmark report.")],
    form: Annotated[
        str,
        typer.Option(
            help=(
                "Format: nvidia-report or timm (of a run), nvidia-benchmark (of a report), dlll (of"
                " both)."
            )
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
) -> None:
    """Write a run or a report in another program's format.

    The formats are those of NVIDIA's examples, dllogger and timm.
    """
    from lockstep.benchmark.foreign_reports import convert

    # It is not renamed into place: the target may be /dev/stdout.
    out.write_text(convert(source, form), encoding="utf-8")
