"""`lockstep export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print


def command(
    source: options.WeightsArgument,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[
        str,
        typer.Option(
            help=(
                "Format: savedmodel, frozen-graph, paddle-inference, torchscript, torch-export,"
                " onnx, openvino, tensorrt "
                "or triton."
            )
        ),
    ] = "savedmodel",
    checkpoint: options.Checkpoint = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
    classes: options.Classes = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=(
                "fp32 (default); bf16 or fp16 of a SavedModel or frozen graph; fp16 or int8 of ONNX"
                " and what is made "
                "of it."
            ),
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            help="Images of every batch: a number, or dynamic. For ONNX and what is made of it."
        ),
    ] = "dynamic",
    bare: Annotated[
        bool,
        typer.Option(
            "--bare",
            help=(
                "Without preprocessing and softmax: from normalised float32 NCHW images to logits."
            ),
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            help="Run the program and compare it with the weights before it gets its name."
        ),
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(
            help="For int8: images to calibrate on (its training part) and to evaluate on."
        ),
    ] = None,
    calibration_images: Annotated[
        int, typer.Option(help="Most images to calibrate on.", min=1)
    ] = 256,
    method: Annotated[
        str, typer.Option(help="How to find ranges for int8: minmax, entropy or percentile.")
    ] = "minmax",
    tolerance: Annotated[
        float, typer.Option(help="The most top-1 that int8 may lose, in percentage points.")
    ] = 1.0,
    assignments: options.SetPreprocessing = None,
    like: options.AsRecipe = None,
) -> None:
    """Write a model for a server, with its preprocessing."""
    from lockstep import export
    from lockstep.cli.console import Reporter

    how: dict[str, Any] = {
        "checkpoint": checkpoint,
        "ema": ema,
        "model": model,
        "classes": classes,
        "precision": precision,
        "compare": compare,
    }
    how |= {"batch": _batch(batch), "bare": bare} | options.for_writing(assignments, like)
    how |= {
        "data": data,
        "calibration_images": calibration_images,
        "method": method,
        "tolerance": tolerance,
    }
    with Reporter() as reporter:
        result = export(source, folder, to=to, **how, listener=reporter)
    print(f"wrote {result['written']}")
    print(f"takes {result['takes']}")
    if loss := result["int8"]:
        print(
            f"top-1 of {loss['validation_images']} images: {loss['top1_before']:.2f} % before int8,"
            f" {loss['top1_after']:.2f} % after ({loss['method']} on {loss['calibration_images']}"
            " images)"
        )
    if found := result["comparison"]:
        print(
            f"compared on {found['images']} photos {_sizes(found['sizes'])}: {found['runtime']} and"
            f" {found['backend']} differ by {found['largest_difference']:.0e} of the"
            f" largest logit (bound {found['bound']:.0e}); top-1 agrees on"
            f" {found['top1_agreement']:.0%}; {found['seconds']:.1f} s"
        )
    for remark in result["remarks"]:
        print(f"note: {in_line(remark)}")


def _sizes(sizes: list[list[int]]) -> str:
    """Return the sizes of what a program got, in words."""
    pixels = sorted(sizes, key=lambda size: size[0] * size[1])
    smallest, largest = (f"{width} x {height}" for height, width in (pixels[0], pixels[-1]))
    return f"of {smallest} to {largest} pixels" if len(sizes) > 1 else f"as {smallest} pixels"


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(
            f"{text!r} is no batch; expected a number from 1, or dynamic", param_hint="--batch"
        )
    return int(text)
