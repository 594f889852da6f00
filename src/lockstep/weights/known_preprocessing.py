"""Preprocessing of other programs whose files do not describe it, as changes of `Recipe` fields.

Sources: torchvision 0.29, transforms/_presets.py and models/resnet.py; MXNet 1.9.1,
gluon/model_zoo/vision/__init__.py and gluon/data/vision/transforms.py; timm 1.0.31, data/config.py;
Flax, examples/imagenet/input_pipeline.py.
"""

from collections.abc import Collection
from pathlib import Path

from lockstep.recipes import Recipe
from lockstep.recipes.published import (
    resnet50_mxnet_90ep,
    resnet50_paddle_90ep,
    resnet50_tensorflow_90ep,
    resnext101_32x4d_pytorch_90ep,
)
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


KNOWN: dict[str, Changes] = {
    "torchvision-v1": {
        **_IMAGENET,
        **PILLOW,
        "interpolation": "bilinear",
        "eval_resize": 256,
        "eval_crop": 224,
    },
    "torchvision-v2": {
        **_IMAGENET,
        **PILLOW,
        "interpolation": "bilinear",
        "eval_resize": 232,
        "eval_crop": 224,
    },
    "timm": {
        **_IMAGENET,
        **PILLOW,
        "interpolation": "bicubic",
        "eval_resize": 256,
        "eval_crop": 224,
    },
    "gluon": {
        **_IMAGENET,
        "interpolation": "bilinear",
        "antialias": False,
        "eval_antialias": False,
        "eval_side_rounding": "down",
        "eval_offset_rounding": "down",
        "eval_sampling": "half_pixel",
        "eval_resize": 256,
        "eval_crop": 224,
        "exif_orientation": False,
    },
    "flax": {
        **_IMAGENET,
        "interpolation": "bicubic",
        "antialias": False,
        "eval_antialias": False,
        "eval_side_rounding": "down",
        "eval_offset_rounding": "up",
        "eval_sampling": "half_pixel",
        "eval_resize": 256,
        "eval_crop": 224,
        "exif_orientation": False,
    },
    "nvidia-paddle": _read_evaluation(resnet50_paddle_90ep()),
    "nvidia-mxnet": _read_evaluation(resnet50_mxnet_90ep()),
    "nvidia-pytorch": _read_evaluation(resnext101_32x4d_pytorch_90ep()),
    "nvidia-tensorflow": _read_evaluation(resnet50_tensorflow_90ep()),
}
"""The evaluation of known origins; each has all of `FIELDS`.

- torchvision-v1 and -v2: `IMAGENET1K_V1` and `IMAGENET1K_V2` of its ResNets.
- timm: what timm assumes where `config.json` says nothing.
- gluon: Gluon's model zoo. Its images are from 0 to 1 before mean and standard deviation; its
  resize is OpenCV's.
- flax: its example for ImageNet. It crops 224/256 of the shorter side and resizes the crop, by
  TensorFlow 2's bicubic (a = -0.5).
- nvidia-*: the published recipes.
"""

_WITHOUT_RECIPE = {"timm": "timm", "Gluon": "gluon", "Flax": "flax"} | dict.fromkeys(
    ("torchvision", "PyTorch", "torchax", "PaddleClas", "paddle.vision"), "torchvision-v1"
)
"""Origins without a published recipe, with the row of `KNOWN` that is assumed for them."""
_WITH_COLOURS_ONLY = ("Keras", "ONNX", "TensorFlow")
"""Origins whose mean and standard deviation are known, and nothing else."""


def assume_preprocessing(
    origin: str, settings: Collection[str] = ()
) -> tuple[Changes, tuple[str, ...]]:
    """Return the preprocessing to use for weights of a file that does not describe it, and a remark
    that it is an assumption.

    The remark leaves out the fields in `settings`, which a user sets. Both are empty if the origin
    has a published recipe, whose preprocessing is used.
    """
    if origin in _WITH_COLOURS_ONLY:
        changes = dict(KNOWN["torchvision-v1"])
        for name in _COLOURS:
            del changes[name]
        return changes, _describe_assumption("torchvision-v1", changes, {*_COLOURS, *settings})
    if origin not in _WITHOUT_RECIPE:
        return {}, ()
    name = _WITHOUT_RECIPE[origin]
    return KNOWN[name], _describe_assumption(name, KNOWN[name], settings)


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


def _describe_assumption(name: str, changes: Changes, known: Collection[str]) -> tuple[str, ...]:
    """Return a remark on what is assumed apart from known fields; none if all of it is known."""
    texts = {
        "eval_resize": f"shorter side {changes['eval_resize']}",
        "eval_crop": f"crop {changes['eval_crop']}",
        "interpolation": changes["interpolation"],
        "mean": "ImageNet's mean",
        "std": "ImageNet's standard deviation",
    }
    parts = [text for field, text in texts.items() if field not in known]
    if _COLOURS.isdisjoint(known):
        parts[-2:] = ["ImageNet's mean and standard deviation"]
    if not parts:
        return ()
    return (
        f"the file does not say how its images were prepared; {name} is assumed:"
        f" {', '.join(parts)}",
    )
