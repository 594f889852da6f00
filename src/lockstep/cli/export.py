"""`lockstep export`."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import escape_line, print
from lockstep.system.text import format_count

To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help=(
            "onnx, torch-export, savedmodel, paddle-inference or stablehlo (default: the first that"
            " runs here); torchscript, frozen-graph, openvino, tensorrt or triton; for phones"
            " executorch or litert."
        ),
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=(
            "fp32 (default); fp16 or int8 for ONNX-based formats; fp16 or bf16 for savedmodel,"
            " frozen-graph and stablehlo; int8 for executorch and litert."
        ),
        show_default=False,
    ),
]
Batch = Annotated[
    str,
    typer.Option(metavar="N", help="Images per batch, or dynamic; for ONNX-based formats."),
]
Bare = Annotated[
    bool,
    rare("--bare", help="Leave out preprocessing and softmax: float32 NCHW to logits."),
]
Compare = Annotated[bool, rare(help="Run the program and compare it with the weights.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="For int8: images to calibrate and to evaluate on."),
]
Images = Annotated[int, rare(help="Calibrate on at most N images.", min=1)]
Method = Annotated[
    str, rare(metavar="NAME", help="How to choose int8 ranges: minmax, entropy or percentile.")
]
Tolerance = Annotated[
    float, rare(metavar="POINTS", help="Largest loss of top-1 with int8, in percentage points.")
]


def command(
    source: options.WeightsArgument,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    to: To = None,
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    classes: options.Classes = None,
    precision: Precision = None,
    batch: Batch = "dynamic",
    bare: Bare = False,
    compare: Compare = True,
    data: Data = None,
    calibration_images: Images = 256,
    method: Method = "minmax",
    tolerance: Tolerance = 1.0,
    assignments: options.SetPreprocessing = None,
    like: options.AsRecipe = None,
    require_signature: options.RequireSignature = None,
    key: options.Sign = None,
) -> None:
    """Write a program for a server or a phone.

    Example: lockstep export run folder --to onnx
    """
    from lockstep import Int8
    from lockstep.cli.console import Reporter

    preprocessing = options.read_preprocessing(assignments, like)
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes}
    chosen |= {"preprocessing": preprocessing, "require_signature": require_signature}
    loaded = options.load_model(source, model, ignore, **chosen)
    wanted: str | Int8 | None = precision
    if precision == "int8" and data is not None:
        wanted = Int8(data, calibration_images, method, tolerance)
    with Reporter() as reporter:
        result = loaded.on(listener=reporter).export(
            folder, to=to, precision=wanted, batch=_parse_batch(batch), bare=bare, compare=compare
        )
    _show(result)
    options.sign_target(folder, key)


def _show(result: dict[str, Any]) -> None:
    from lockstep.models.accuracy_interval import format_accuracy

    print(f"wrote {result['written']}")
    print(f"takes {result['takes']}")
    loss = result["int8"]
    if loss is not None:
        images = loss["validation_images"]
        before, after = (
            format_accuracy(loss[key], images) for key in ("top1_before", "top1_after")
        )
        print(
            f"top-1 of {format_count(images, 'image')}: {before} before int8, {after} after"
            f" ({loss['method']} on {format_count(loss['calibration_images'], 'image')})"
        )
    comparison = result["comparison"]
    if comparison is not None:
        print(
            f"compared on {format_count(comparison['images'], 'photo')}"
            f" {_describe_sizes(comparison['sizes'])}: the export in {comparison['runtime']} and"
            f" the weights in {comparison['backend']} differ by"
            f" {comparison['largest_difference']:.0e} of the largest logit (bound"
            f" {comparison['bound']:.0e}); top-1 agrees on {comparison['top1_agreement']:.0%};"
            f" {comparison['seconds']:.1f} s"
        )
    if result["proof"] is not None:
        check = shlex.quote(f"{result['proof']}/check.py")
        print(f"proof: python {check} checks the model where it runs")
    for remark in result["remarks"]:
        print(f"note: {escape_line(remark)}")


def _describe_sizes(sizes: list[list[int]]) -> str:
    """Describe the sizes of the images that a program computed."""
    pixels = sorted(sizes, key=lambda size: size[0] * size[1])
    smallest, largest = (f"{width} x {height}" for height, width in (pixels[0], pixels[-1]))
    return f"of {smallest} to {largest} pixels" if len(sizes) > 1 else f"as {smallest} pixels"


def _parse_batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(
            f"{text!r} is not a batch; expected a number from 1, or dynamic", param_hint="--batch"
        )
    return int(text)
