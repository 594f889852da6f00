"""Preprocessing of other programs whose files do not describe it, as changes of `Recipe` fields.

Sources: torchvision 0.29, transforms/_presets.py and models/resnet.py; MXNet 1.9.1,
gluon/model_zoo/vision/__init__.py and gluon/data/vision/transforms.py; timm 1.0.31, data/config.py;
Flax, examples/imagenet/input_pipeline.py.
"""

import math
from collections.abc import Collection, Set
from pathlib import Path

from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import (
    resnet50_mxnet_90ep,
    resnet50_paddle_90ep,
    resnet50_tensorflow_90ep,
    resnext101_32x4d_pytorch_90ep,
)
from lockstep.recipes.recipe import eval_fields
from lockstep.weights.fingerprints import hash_file
from lockstep.weights.known_weights import read_known_weights
from lockstep.weights.preprocessing import FIELDS, Changes

PILLOW: Changes = {
    "antialias": True,
    "eval_antialias": True,
    "eval_side_rounding": "down",
    "eval_offset_rounding": "even",
    "eval_sampling": "half_pixel",
    "exif_orientation": False,
}
"""How torchvision and timm resize with Pillow, and crop."""
_IMAGENET = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
_COLOURS = frozenset(_IMAGENET)


def _read_evaluation(recipe: Recipe) -> Changes:
    return {name: getattr(recipe, name) for name in FIELDS}


_TORCHVISION: Changes = {
    **_IMAGENET,
    **PILLOW,
    "interpolation": "bilinear",
    "eval_resize": 256,
    "eval_crop": 224,
}
_UNFILTERED = _TORCHVISION | {"antialias": False, "eval_antialias": False}
KNOWN: dict[str, Changes] = {
    "torchvision-v1": _TORCHVISION,
    "torchvision-v2": _TORCHVISION | {"eval_resize": 232},
    "timm": _TORCHVISION | {"interpolation": "bicubic"},
    "keras": _TORCHVISION | {"mean": (123.68, 116.779, 103.939), "std": (1.0, 1.0, 1.0)},
    "gluon": _UNFILTERED | {"eval_offset_rounding": "down"},
    "flax": _UNFILTERED | {"interpolation": "bicubic", "eval_offset_rounding": "up"},
    "nvidia-paddle": _read_evaluation(resnet50_paddle_90ep()),
    "nvidia-mxnet": _read_evaluation(resnet50_mxnet_90ep()),
    "nvidia-pytorch": _read_evaluation(resnext101_32x4d_pytorch_90ep()),
    "nvidia-tensorflow": _read_evaluation(resnet50_tensorflow_90ep()),
}
"""The evaluation of known origins; each has all of `FIELDS`.

- torchvision-v1 and -v2: `IMAGENET1K_V1` and `IMAGENET1K_V2` of its ResNets.
- timm: what timm assumes where `config.json` says nothing.
- keras: the colours of `preprocess_input` of Keras' ResNets, whose images are BGR, as RGB; the
  rest as torchvision-v1, since Keras does not say it.
- gluon: Gluon's model zoo. Its images are from 0 to 1 before mean and standard deviation; its
  resize is OpenCV's.
- flax: its example for ImageNet. It crops 224/256 of the shorter side and resizes the crop, by
  TensorFlow 2's bicubic (a = -0.5).
- nvidia-*: the published recipes.
"""

_ROWS = {"Gluon": "gluon", "Flax": "flax", "Keras": "keras"}
_ROWS |= dict.fromkeys(("timm", "transformers"), "timm")
_ROWS |= dict.fromkeys(
    ("torchvision", "PyTorch", "torchax", "PaddleClas", "paddle.vision", "ONNX", "TensorFlow"),
    "torchvision-v1",
)
"""Origins without a published recipe, with the row of `KNOWN` that is assumed for them."""


def assume_preprocessing(
    origin: str,
    known: Collection[str] = (),
    settings: Collection[str] = (),
    crop: int = Recipe().eval_crop,
) -> tuple[Changes, tuple[str, ...]]:
    """Return the preprocessing to use for weights of a file that does not say all of it, and a
    remark that it is an assumption.

    `origin` is that of the weights, or a row of `KNOWN`. `known` are the fields that are not
    assumed. If the crop is one of them, it is `crop`, which the shorter side follows. The remark
    also leaves out the fields in `settings`, which a user sets. Both are empty if the origin has a
    published recipe, whose preprocessing is used.
    """
    row = _ROWS.get(origin, origin)
    if row not in KNOWN:
        return {}, ()
    changes = {name: value for name, value in KNOWN[row].items() if name not in known}
    if "eval_crop" in known and "eval_resize" in changes:
        changes["eval_resize"] = eval_fields({"image_size": crop})["eval_resize"]
        if row == "timm":
            changes["eval_resize"] = math.floor(crop / 0.875)
    remarks = _describe_assumption(row, KNOWN[row] | changes, changes.keys() - settings)
    if origin == "PyTorch" and remarks and "interpolation" in changes.keys() - settings:
        remarks = (f"{remarks[0]} (timm's weights need bicubic: set interpolation)",)
    return changes, remarks


def find_published(path: Path) -> Changes | None:
    """Return the model and the preprocessing of a file that is one of the known weights, whatever
    it is called; None for any other file. All of its bytes are read for their SHA-256."""
    if path.suffix != ".pth" or not path.is_file():
        return None
    digest = hash_file(path)
    for weights in read_known_weights().values():
        if digest.startswith(weights.sha256_start):
            return KNOWN["torchvision-v1"] | weights.preprocessing | {"model": weights.model}
    return None


def _describe_assumption(row: str, values: Changes, assumed: Set[str]) -> tuple[str, ...]:
    """Return a remark that these fields of a row are assumed; none if there are none."""
    owner = "preprocess_input's" if row == "keras" else "ImageNet's"
    texts = {
        "eval_resize": f"shorter side {values['eval_resize']}",
        "eval_crop": f"crop {values['eval_crop']}",
        "interpolation": values["interpolation"],
        "mean": f"{owner} mean",
        "std": f"{owner} standard deviation",
    }
    parts = [text for field, text in texts.items() if field in assumed]
    if assumed >= _COLOURS:
        parts[-2:] = [f"{owner} mean and standard deviation"]
    if not parts:
        return ()
    remark = f"the file does not say how its images were prepared; {row} is assumed: "
    remark += ", ".join(parts)
    if row == "timm" and "eval_resize" in assumed:
        fields = [name for name in texts if name in assumed]
        remark += " (some of timm's weights need other values, such as crop_pct 0.95: set "
        remark += f"{', '.join(fields)})"
    return (remark,)
