"""Weights files as PyTorch itself reads them, for the certificate of a conversion."""

from pathlib import Path
from typing import Any

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
