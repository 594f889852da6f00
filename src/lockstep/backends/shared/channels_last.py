"""Tensors in the layouts of frameworks whose images are NHWC: kernels [height, width, in / groups,
out], classifier [in, out]."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.models.state import check_fit
from lockstep.recipes import Recipe

_AXES = {0: (), 1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
"""The canonical axis for each axis of a framework, by the number of axes."""


def convert_to_canonical(value: Any) -> np.ndarray:
    """Return a copy in canonical layout."""
    array = np.asarray(value)
    return np.array(array.transpose(np.argsort(_AXES[array.ndim])), order="C")


def convert_from_canonical(array: np.ndarray) -> np.ndarray:
    """Return a copy of an array in the framework's layout."""
    return np.array(array.transpose(_AXES[array.ndim]), order="C")


def canonical_shapes(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in canonical layout."""
    return {
        name: tuple(value.shape[axis] for axis in np.argsort(_AXES[len(value.shape)]))
        for name, value in values.items()
    }


def convert_all(
    mine: Mapping[str, Any], values: Mapping[str, np.ndarray], what: str
) -> dict[str, np.ndarray]:
    """Return float32 copies of canonical arrays in the layouts of tensors of the same names. Raises
    `CheckpointError` if names or shapes differ."""
    check_fit(canonical_shapes(mine), values, what)
    return {name: convert_from_canonical(np.asarray(values[name], np.float32)) for name in mine}


def new_arrays(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return zeros for every tensor of the recipe's model, by canonical name, in these layouts."""
    return {
        tensor.name: np.zeros([tensor.shape[axis] for axis in _AXES[len(tensor.shape)]], np.float32)
        for tensor in recipe.list_tensors()
    }
