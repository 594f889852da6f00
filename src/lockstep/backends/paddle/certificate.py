"""For the certificate of a conversion: weights files as Paddle itself reads them, and what the
network of paddle.vision computes of tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lockstep.backends.paddle.framework_import import paddle
from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> Any:
    """Return the arrays of a `.pdparams` or `.pdopt` by name, of any shape and dtype. `recipe` is
    not needed.

    Paddle unpickles the file, so it must be one that Lockstep has just written. Raises what Paddle
    raises.
    """
    return paddle.load(str(path), return_numpy=True)


_NAMES = {"running_mean": "_mean", "running_var": "_variance"}


def compute(folder: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the logits [N, classes] of images, float32 [N, 3, H, W], and the program's version.

    The folder holds `module.json`, with the network's name and its classes, and
    `module.safetensors`, by canonical name. Raises `ImportError` if paddle.vision does not have the
    network.
    """
    about = json.loads((folder / "module.json").read_text(encoding="utf-8"))
    name = about["model"].replace("-", "_")
    build = getattr(paddle.vision.models, name, None)
    if build is None:
        raise ImportError(f"paddle.vision has no {name}")
    module = build(pretrained=False, num_classes=about["logits"])
    arrays = {}
    for name, values in load_file(folder / "module.safetensors").items():
        scope, _, leaf = name.rpartition(".")
        arrays[f"{scope}.{_NAMES.get(leaf, leaf)}"] = values.T if name == "fc.weight" else values
    missing, unexpected = module.set_state_dict(arrays)
    if missing or unexpected:
        raise ImportError(f"paddle.vision's {about['model']} has different tensors: {missing[:3]}")
    module.eval()
    with paddle.no_grad():
        logits = module(paddle.to_tensor(images)).numpy()
    return np.asarray(
        logits
    ), f"paddle.vision {paddle.__version__}'s {about['model']} with these tensors"
