"""For the certificate of a conversion: weights files as PyTorch itself reads them, and what timm's
or torchvision's own network computes of tensors."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> Any:
    """Return what a file of safetensors or of `torch.save` holds: tensors of any shape and dtype,
    in dicts and lists.

    Only weights and plain values are loaded. `recipe` is not needed. Raises what PyTorch raises.
    """
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def compute(folder: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the logits [N, classes] of images, float32 [N, 3, H, W], and the program's version.

    The folder holds `module.json`, with the network's name and its classes, and
    `module.safetensors`. Raises `ImportError` if neither timm nor torchvision can be imported or
    has the network. A folder `model` is one of transformers instead.
    """
    if (folder / "model").exists():
        transformers = importlib.import_module("transformers")
        network = transformers.ResNetForImageClassification.from_pretrained(folder / "model")
        with torch.inference_mode():
            logits = network.eval()(torch.from_numpy(images)).logits
        return np.asarray(logits), f"transformers {transformers.__version__}"
    about = json.loads((folder / "module.json").read_text(encoding="utf-8"))
    module, version = _build(about["model"].replace("-", "_"), about["logits"])
    tensors = load_file(folder / "module.safetensors")
    counters = {name for name in module.state_dict() if name.endswith("num_batches_tracked")}
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    if set(missing) - counters or unexpected:
        raise ImportError(f"{version} has different tensors: {sorted({*missing, *unexpected})[:3]}")
    module.eval()
    with torch.inference_mode():
        return np.asarray(module(torch.from_numpy(images)).numpy()), version


def _build(name: str, logits: int) -> tuple[Any, str]:
    """Return a network without weights, and the package that has it."""
    try:
        timm = importlib.import_module("timm")
        if timm.is_model(name):
            return timm.create_model(
                name, num_classes=logits
            ), f"timm {timm.__version__}'s {name} with these tensors"
    except (ImportError, RuntimeError):  # timm imports torchvision, which may not fit PyTorch
        pass
    torchvision = importlib.import_module("torchvision")
    build = getattr(torchvision.models, name, None)
    if build is None:
        raise ImportError(f"neither timm nor torchvision has {name}")
    return build(
        weights=None, num_classes=logits
    ), f"torchvision {torchvision.__version__}'s {name} with these tensors"
