"""Export trained models to files that a server's runtime loads without Lockstep."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.inference.comparison import compared
from lockstep.inference.preprocessing_file import write_preprocessing
from lockstep.inference.programs import write_description
from lockstep.inference.quantising import Calibration, quantised
from lockstep.inference.targets import PRECISIONS, Target, Wanted, in_float, target_of
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.deprecation import accept_old_names
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing_folder
from lockstep.weights import Classes, Preprocessing, Weights, open_weights

_IN_MANY_PRECISIONS = ("savedmodel", "frozen-graph")
"""Formats that can compute in bf16 and fp16, too."""


@accept_old_names(which="checkpoint")
def export(
    source: str | Path,
    folder: str | Path,
    *,
    to: str = "savedmodel",
    checkpoint: str = "newest",
    ema: bool = False,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
    batch: int | None = None,
    bare: bool = False,
    compare: bool = True,
    data: str | Path | None = None,
    calibration_images: int = 256,
    method: str = "minmax",
    tolerance: float = 1.0,
    preprocessing: Preprocessing | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Write a model for a server, with preprocessing and softmax inside; return what was written.

    A program takes `images`, photos of any size, and answers as `predict` does: it resizes them as
    the recipe's evaluation, with the same sampling, filter and rounding, crops and normalises them.
    All images of a batch have the same size. Where a program takes squares only ("tensorrt", or
    `bare`), height and width are fixed, and `preprocessing.py` next to it says and does the rest.

    `source` is whatever `evaluate` accepts, trained on any engine. `to` is one of:

    - "savedmodel", for TensorFlow. Its `serving_default` takes `images`, uint8 RGB [N, H, W, 3],
      and returns `classes`, int64 [N], and `probabilities`, float32 [N, logits]. It computes in
      `precision`, by default fp32 whatever the recipe's precision is. Weights are float32.
    - "frozen-graph": `frozen_graph.pb`, for older programs of TensorFlow. It is what a SavedModel
      is, with constants as weights; inputs, outputs and precisions are the same.
    - "paddle-inference", or without "-inference": `model.json` and `model.pdiparams`, in fp32 only.
      Inputs and outputs are the same.
    - "torchscript": `model.pt`, and "torch-export": `model.pt2`, for PyTorch, in fp32 only. Inputs
      and outputs are those of "savedmodel".
    - "onnx": `model.onnx`, in fp32, fp16 or int8. Inputs and outputs are those of "savedmodel".
      Weights that were trained with quantisation are written with QuantizeLinear and
      DequantizeLinear, unless `precision` is given and is not int8. The formats that are not made
      of ONNX compute with them in float, and a remark says so.

    - "openvino": `model.xml` and `model.bin`; "tensorrt": `model.plan` for this machine's GPU;
      "triton": a model repository with the ONNX model. They are made of the ONNX model, and take
      the same photos as it, but "tensorrt" takes squares of the evaluation's size.

    Formats that are made of ONNX take two more options. `batch` fixes the number of images of a
    batch; for "triton" it is the largest batch. Without it, "triton" and "tensorrt" take 1 to 32
    images. `bare` leaves out preprocessing and softmax: the model takes `input`, normalised float32
    [N, 3, S, S], and returns `logits`.

    For int8, other weights are quantised after training (`lockstep.inference.quantising`): on
    `calibration_images` training images of `data`, by `method`: "minmax", "entropy" or
    "percentile". `int8` of the result has top-1 on the validation images before and after. Losing
    more than `tolerance` percentage points is an error. `listener` gets the progress.

    `model` names the model of a file that fits several, such as resnet50 and resnet50-v1. `classes`
    replaces the names of the classes: names, class 0 first, or a file that lists them.
    `preprocessing` is that of `lockstep.evaluate`.

    With `compare`, the program is run by its own runtime on fixed images before it gets its name,
    and compared with an engine (`lockstep.inference.comparison`). `comparison` of the result has
    the figures. It is None if nothing was compared; if the runtime is missing, a remark says so.

    The folder appears only when it is complete; nothing is overwritten. Raises `CheckpointError`,
    `RecipeError`, `DataError` if `classes` does not fit the weights, and `BackendError` if the
    framework or package is missing.
    """
    folder = Path(folder)
    target = target_of(to)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; name a new folder")
    _check_options(target, precision, batch=batch, bare=bare)
    chosen: dict[str, Any] = {
        "checkpoint": checkpoint,
        "ema": ema,
        "model": model,
        "preprocessing": preprocessing,
    }
    found = open_weights(source, **chosen).replace_classes(classes)
    remarks = [*found.remarks, *_about_precision(target, found, precision), *_about_decoding(found)]
    wanted = _wanted(target, found, precision, batch, bare=bare)
    comparison = None
    loss = None
    if precision == "int8" and not found.scales:
        how = _calibration(data, calibration_images, method, tolerance)
        model_in_int8, loss = quantised(target, wanted, how, Recorder(listener))
        wanted = replace(wanted, quantised=model_in_int8)
    if compare and target.runtime() is None:
        compare = False
        remarks.append(
            f"not compared with the weights; that needs {target.distributions[0]}: {target.install}"
        )
    try:
        with appearing_folder(folder) as unfinished:
            target.write(wanted, unfinished)
            write_description(unfinished, target, wanted, _computed_in(wanted, precision))
            if not target.resizes(wanted):
                write_preprocessing(unfinished, wanted.weights.recipe, normalises=bare)
            if compare:
                comparison = compared(target, wanted, unfinished, precision or "fp32")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return {
        "source": str(wanted.weights.source),
        "written": str(folder),
        "model": wanted.weights.recipe.fields()["model"],
        "logits": wanted.weights.recipe.logits,
        "takes": target.describe_input(wanted),
        "comparison": comparison,
        "int8": loss,
        "remarks": remarks,
    }


def _check_options(target: Target, precision: str | None, *, batch: int | None, bare: bool) -> None:
    """Raise `CheckpointError` if a format does not have an option. Backends check other precisions
    than int8 themselves."""
    if target.backend is None:
        if precision not in (None, *PRECISIONS):
            raise CheckpointError(
                f"{target.name} is written in {', '.join(PRECISIONS)}, not in {precision}; leave"
                " out precision: the program that runs the model can choose its own"
            )
        return
    given = [
        name for name, is_given in (("--batch", batch is not None), ("--bare", bare)) if is_given
    ]
    given += ["--precision int8"] if precision == "int8" else []
    if given:
        raise CheckpointError(
            f"{target.name} has no {given[0]}; leave it out, or export to onnx, which has it"
        )


def _calibration(
    data: str | Path | None, images: int, method: str, tolerance: float
) -> Calibration:
    if data is None:
        raise CheckpointError(
            "int8 needs images, because these weights were not trained with quantisation: --data"
            " DATA calibrates on its training images and evaluates on its validation images"
        )
    if images < 1 or not tolerance >= 0:
        raise CheckpointError(
            f"{images} calibration images and a tolerance of {tolerance}; expected 1 or more, and 0"
            " or more"
        )
    return Calibration(Path(data), images, method, tolerance)


def _wanted(
    target: Target, found: Weights, precision: str | None, batch: int | None, *, bare: bool
) -> Wanted:
    """Return what to write. Scales of weights that were trained with quantisation are used where
    the format has them."""
    wanted = Wanted(
        found.replace_precision("fp32" if precision in (None, "int8") else precision), batch, bare
    )
    if not found.scales or (target.backend is None and precision in (None, "int8")):
        return wanted
    return in_float(wanted)


def _computed_in(wanted: Wanted, precision: str | None) -> str:
    """Return the precision that a program computes in."""
    return "int8" if wanted.weights.scales else precision or "fp32"


def _about_precision(target: Target, found: Weights, precision: str | None) -> list[str]:
    """Return remarks if the program computes in another precision than the weights were trained
    for."""
    remarks = []
    trained_in = found.recipe.precision
    if precision is None and trained_in in ("bf16", "fp16"):
        other = (
            f" (--precision {trained_in} computes in it)"
            if target.name in _IN_MANY_PRECISIONS
            else ""
        )
        remarks.append(f"computes in fp32; the weights were trained in {trained_in}{other}")
    if found.scales and (target.backend is not None or precision not in (None, "int8")):
        how = "--to onnx" if target.backend else "without --precision, or with int8, it"
        remarks.append(
            f"{target.name} computes in float, but the weights were trained for"
            f" {found.recipe.quantisation}; {how} quantises"
        )
    return remarks


def _about_decoding(weights: Weights) -> list[str]:
    """Return remarks on what `predict` does while it decodes a photo. A program gets pixels."""
    remarks = []
    if weights.recipe.exif_orientation:
        remarks.append(
            "takes pixels: turn photos by their EXIF orientation before (in Python:"
            " PIL.ImageOps.exif_transpose), as `lockstep predict` does"
        )
    if weights.recipe.dct_scaling:
        remarks.append(
            "takes pixels: `lockstep predict` decodes large JPEGs at 1/2, 1/4 or 1/8 of their size"
            " (dct_scaling), so their pixels differ a little from a whole photo's"
        )
    return remarks
