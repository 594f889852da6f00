"""Trained models as files that a framework's server loads without Lockstep."""

import importlib
import shutil
from pathlib import Path
from typing import Any

from lockstep import backends
from lockstep.system.errors import CheckpointError, nearest
from lockstep.weights.opening import open_weights

FORMATS: dict[str, str | None] = {
    form: name for name, framework in backends.FRAMEWORKS.items() for form in framework.exports
} | {"onnx": None}
"""What can be written, and the backend whose module `export` writes it; None: it needs none."""


def export(
    source: str | Path,
    folder: str | Path,
    *,
    to: str = "savedmodel",
    which: str = "newest",
    ema: bool = False,
    precision: str | None = None,
) -> dict[str, Any]:
    """Write a model for a framework's server, its preprocessing and softmax inside; return what was written.

    `source` is all that `evaluate` takes, trained on any engine. "savedmodel": TensorFlow's; its `serving_default` takes
    `images`, uint8 RGB [N, H, W, 3], and returns `classes`, int64 [N], and `probabilities`, float32 [N, logits]. It
    computes in `precision`, by default in fp32, whatever the recipe's is; weights are float32. "paddle-inference":
    `model.json` and `model.pdiparams`, in fp32 alone; the program takes and returns the same, but images of the
    evaluation's size only. "onnx": `model.onnx`, in fp32 alone, which takes and returns the same as the first. The folder
    appears when it is whole; nothing is overwritten. Raises `CheckpointError`, `RecipeError`, and `BackendError` without
    the framework or package.
    """
    folder = Path(folder)
    if to not in FORMATS:
        raise CheckpointError(f"there is no format {to!r} to export to. {nearest(to, FORMATS)}")
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; name a new folder")
    found = open_weights(source, which=which, ema=ema)
    weights = found.in_precision(precision or "fp32")
    remarks, backend = list(weights.remarks), FORMATS[to]
    if precision is None and found.recipe.precision in ("bf16", "fp16"):
        trained_in = found.recipe.precision
        other = f" (--precision {trained_in} computes in it)" if to == "savedmodel" else ""
        remarks.append(f"computes in fp32; the weights were trained in {trained_in}{other}")
    if backend is not None:
        backends.load(backend)
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(
        "lockstep.inference.onnx_model" if backend is None else f"lockstep.backends.{backend}.export"
    )
    module.export(weights.recipe, weights.tensors, weights.classes, unfinished)
    unfinished.rename(folder)
    return {
        "source": str(weights.source),
        "written": str(folder),
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "remarks": remarks,
    }
