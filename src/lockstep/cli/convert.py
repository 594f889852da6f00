"""`lockstep convert`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import print


def command(
    source: Annotated[
        Path,
        typer.Argument(help="A run's folder, a checkpoint (also of TensorFlow, Paddle or MXNet) or a .safetensors file."),
    ],
    target: Annotated[Path, typer.Argument(help="A new file; for NVIDIA's formats, a new prefix such as model.ckpt-0.")],
    to: Annotated[
        str, typer.Option(help="Format: safetensors, nvidia-tensorflow, nvidia-paddle or nvidia-mxnet.")
    ] = "safetensors",
    which: options.Which = "newest",
    ema: options.Ema = False,
    classes: options.Classes = None,
) -> None:
    """Write weights in another format; nothing is overwritten."""
    from lockstep import convert

    result = convert(source, target, to=to, which=which, ema=ema, classes=classes)
    for path in result["written"]:
        print(f"wrote {path}")
    for remark in result["remarks"]:
        print(f"note: {remark}")
