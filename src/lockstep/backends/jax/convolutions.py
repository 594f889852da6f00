"""Convolutions."""

from collections.abc import Sequence
from typing import Any

from jax import lax

Array = Any


def convolve(
    x: Array,
    kernel: Array,
    strides: tuple[int, int],
    padding: Sequence[tuple[int, int]],
    groups: int,
    precision: lax.Precision | None = None,
) -> Array:
    """Return the convolution of images [N, H, W, C] with a kernel [height, width, C / groups, O],
    padded with zeros before and after both axes."""
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        precision=precision,
    )
