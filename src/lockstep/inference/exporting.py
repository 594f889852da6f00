"""Export trained models to files that a framework's server loads without Lockstep."""

import importlib
from pathlib import Path
from typing import Any

from lockstep import backends
from lockstep.system.errors import CheckpointError, nearest
from lockstep.system.files import appearing_folder
from lockstep.weights.class_names import Classes
from lockstep.weights.opening import open_weights

FORMATS: dict[str, tuple[str | None, str]] = {
    form: (name, function) for name, framework in backends.FRAMEWORKS.items() for form, function in framework.exports.items()
} | {"onnx": (None, "export")}
"""Formats, each with the backend whose module `export` writes it, and the function; None: no framework is needed."""


def export(
    source: str | Path,
    folder: str | Path,
    *,
    to: str = "savedmodel",
    which: str = "newest",
    ema: bool = False,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
) -> dict[str, Any]:
    """Write a model for a framework's server, with preprocessing and softmax inside; return what was written.

    `source` is whatever `evaluate` accepts, trained on any engine. `to` is one of:

    - "savedmodel", for TensorFlow. Its `serving_default` takes `images`, uint8 RGB [N, H, W, 3], and returns `classes`,
      int64 [N], and `probabilities`, float32 [N, logits]. It computes in `precision`, by default fp32 whatever the
      recipe's precision is. Weights are float32.
    - "paddle-inference": `model.json` and `model.pdiparams`, in fp32 only. Inputs and outputs are the same, but images
      must have the evaluation's size.
    - "torchscript": `model.pt`, and "torch-export": `model.pt2`, for PyTorch, in fp32 only. Inputs and outputs are those of
      "savedmodel".
    - "onnx": `model.onnx`, in fp32 only. Inputs and outputs are those of "savedmodel". Weights that were trained with
      quantisation are written with QuantizeLinear and DequantizeLinear. The other formats compute with them in float, and a
      remark says so.

    `model` names the model of a file that fits several, such as resnet50 and resnet50-v1. `classes` replaces the names of
    the classes: names, class 0 first, or a file that lists them.

    The folder appears only when it is complete; nothing is overwritten. Raises `CheckpointError`, `RecipeError`,
    `DataError` if `classes` does not fit the weights, and `BackendError` if the framework or package is missing.
    """
    folder = Path(folder)
    if to not in FORMATS:
        raise CheckpointError(f"there is no format {to!r} to export to. {nearest(to, FORMATS)}")
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; name a new folder")
    found = open_weights(source, which=which, ema=ema, model=model).with_classes(classes)
    weights = found.in_precision(precision or "fp32")
    remarks, (backend, function) = list(weights.remarks), FORMATS[to]
    if precision is None and found.recipe.precision in ("bf16", "fp16"):
        trained_in = found.recipe.precision
        other = f" (--precision {trained_in} computes in it)" if to == "savedmodel" else ""
        remarks.append(f"computes in fp32; the weights were trained in {trained_in}{other}")
    quantised = {"scales": weights.scales} if weights.scales and to == "onnx" else {}
    if weights.scales and not quantised:
        remarks.append(
            f"{to} computes in float, but the weights were trained for {weights.recipe.quantisation}; --to onnx quantises"
        )
    if backend is not None:
        backends.load(backend)
    module = importlib.import_module(
        "lockstep.inference.onnx_model" if backend is None else f"lockstep.backends.{backend}.export"
    )
    write = getattr(module, function)
    try:
        with appearing_folder(folder) as unfinished:
            write(weights.recipe, weights.tensors, weights.classes, unfinished, **quantised)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return {
        "source": str(weights.source),
        "written": str(folder),
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "remarks": remarks,
    }
