"""`lockstep export`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print


def command(
    source: Annotated[Path, typer.Argument(help=options.WEIGHTS)],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[
        str, typer.Option(help="Format: savedmodel, paddle-inference, torchscript, torch-export or onnx.")
    ] = "savedmodel",
    which: options.Which = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
    classes: options.Classes = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of a SavedModel: fp32 (default), bf16 or fp16.", show_default=False)
    ] = None,
) -> None:
    """Write a model for a server, with its preprocessing."""
    from lockstep import export

    result = export(source, folder, to=to, which=which, ema=ema, model=model, classes=classes, precision=precision)
    print(f"wrote {result['written']}")
    for remark in result["remarks"]:
        print(f"note: {in_line(remark)}")
