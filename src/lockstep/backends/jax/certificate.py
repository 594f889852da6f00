"""Weights files as NumPy and Flax read them for JAX, for the certificate of a conversion.

JAX itself would turn int64 into int32.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> Any:
    """Return what a file of `numpy.savez`, of safetensors or of Flax holds: arrays of any shape and
    dtype, in dicts.

    The result is None for a file of Flax where Flax is not installed. `recipe` is not needed.
    Raises what NumPy, safetensors and Flax raise.
    """
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    if path.suffix == ".safetensors":
        return load_file(path)
    if importlib.util.find_spec("flax") is None:
        return None
    from flax import serialization

    return serialization.msgpack_restore(path.read_bytes())
