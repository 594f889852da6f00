"""Max pooling whose gradient XLA computes fast on CPUs."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
WINDOW = 3


def pool_largest(x: Array, stride: int, padding: Sequence[tuple[int, int]]) -> Array:
    """Return the largest value of every window of 3 x 3 pixels of images [N, H, W, C], which are
    padded before and after both axes. NaN is the largest.

    The gradient goes to the first of equal values, in the order of rows. Rows and columns are
    pooled one after the other, as slices: the gradient of XLA's own operation is one long loop on a
    CPU (benchmarks/notes/engines.md).
    """
    for axis in (2, 1):
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (*padding[axis - 1], 0)
        x = lax.pad(x, np.array(-np.inf, x.dtype), pads)
        last = (x.shape[axis] - WINDOW) // stride * stride
        largest, *others = (
            lax.slice_in_dim(x, place, place + last + 1, stride, axis) for place in range(WINDOW)
        )
        for other in others:
            is_larger = (other > largest) | (other != other)
            largest = jnp.where(is_larger, other, largest)
        x = largest
    return x
