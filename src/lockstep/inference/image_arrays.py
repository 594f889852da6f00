"""Arrays and tensors of any library as images: NumPy's arrays, uint8 RGB [height, width, 3].

No library is imported: tensors are copied to the host by their own methods.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Tensor(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Sequence[int]:
        """The lengths of its axes."""


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor of one image or of several, of any shape.

    NumPy, PyTorch, TensorFlow, Paddle, JAX and MXNet have such values. Tables and columns of paths
    have fewer axes.
    """
    if isinstance(value, np.ndarray):
        return True
    shape = getattr(value, "shape", None)
    is_tensor = hasattr(value, "__array__") or hasattr(value, "asnumpy")
    return is_tensor and shape is not None and len(shape) in (3, 4)


def read_array(value: Any) -> np.ndarray:
    """Return an array or a tensor as uint8 RGB [height, width, 3], or [N, height, width, 3].

    - Colours may come first, [3, height, width], as PyTorch has them; an array whose last axis is 3
      has them last.
    - Floats are from 0 to 1, as `torchvision.transforms.ToTensor` returns them.

    Raises `ValueError` that describes the array if it is no image.
    """
    array = _copy_to_host(value)
    described = f"{array.dtype} array {list(array.shape)}"
    if array.ndim not in (3, 4) or not array.size:
        raise ValueError(described)
    if array.shape[-1] != 3 and array.shape[-3] == 3:
        array = np.moveaxis(array, -3, -1)
    if array.shape[-1] != 3:
        raise ValueError(described)
    if array.dtype.kind != "f":
        if array.dtype != np.uint8:
            raise ValueError(described)
        return array
    low, high = float(array.min()), float(array.max())
    if not 0 <= low <= high <= 1:
        raise ValueError(f"{described} with values from {low:g} to {high:g}")
    return np.rint(array.astype(np.float64) * 255).astype(np.uint8)


def _copy_to_host(value: Any) -> np.ndarray:
    """Return NumPy's array of a value. Raises `ValueError` if it has a type that NumPy lacks."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "asnumpy"):  # MXNet
        return np.asarray(value.asnumpy())
    if hasattr(value, "detach"):  # PyTorch, Paddle: it may have a gradient, or be on a GPU
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except TypeError:  # PyTorch's bfloat16
        raise ValueError(f"{value.dtype} tensor {list(value.shape)}") from None
