"""`lockstep benchmark convert`."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="The folder of a run, or a benchmark report.")],
    form: Annotated[
        str, typer.Option(help="nvidia-report or timm (of a run), nvidia-benchmark (of a report), dlll (of both).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
) -> None:
    """Write a run or a report in another program's form.

    That of NVIDIA's examples, dllogger or timm.
    """
    from lockstep.benchmark.foreign_reports import converted

    out.write_text(converted(source, form), encoding="utf-8")  # not renamed into place: it may be /dev/stdout
