"""How far a fused batch norm may be from float64: what rounding explains, value by value.

The functions take and return float64 arrays of NumPy or PyTorch, seen as [rows, C] or [C]. The
bounds are of first order in the rounding of float32, and their sums are those of rounding errors in
random directions.
"""

from dataclasses import dataclass
from typing import Any

FLOAT32 = 2.0**-24
"""The largest relative error of one rounding to float32."""
OPERATIONS = 8
"""Roundings on the way of a value into a sum and of the sum to its result: differences, products, a
division."""
CERTAINTY = 4.0
"""Rounding errors in random directions grow with the square root of their number. Normal errors
exceed 4 times that in less than one of 10,000 sums. The kernels add up in a tree, so their errors
are smaller."""


@dataclass(frozen=True)
class Storage:
    """How the type of activations rounds what is stored."""

    relative: float
    """The largest relative error."""
    smallest: float
    """The smallest value of the type. What is below half of it becomes 0."""


STORAGE = {
    "float32": Storage(FLOAT32, 2.0**-149),
    "bfloat16": Storage(2.0**-8, 2.0**-133),
    "float16": Storage(2.0**-11, 2.0**-24),
}


@dataclass(frozen=True)
class Batch:
    """What a batch norm is given, and the gradient it gets, in float64."""

    x: Any
    """[rows, C]"""
    weight: Any
    """[C]"""
    bias: Any
    """[C]"""
    eps: float
    storage: Storage
    residual: Any = 0.0
    """[rows, C], or 0"""
    dz: Any = 0.0
    """[rows, C]: the gradient of the result, 0 where ReLU is."""


@dataclass(frozen=True)
class Bounds:
    """The largest differences that rounding explains, of everything that a fused batch norm
    returns."""

    mean: Any
    rstd: Any
    """Of 1 / deviation, [C]."""
    variance: Any
    """Of the biased variance, [C]."""
    y: Any
    dx: Any
    weight_gradient: Any
    bias_gradient: Any


def summing(count: int) -> float:
    """Return the bound of a sum of `count` values in float32, relative to the sum of their
    magnitudes."""
    return (OPERATIONS + min(count, CERTAINTY * count**0.5)) * FLOAT32


def batch_norm_bounds(batch: Batch) -> Bounds:
    """Return the bounds of a batch norm with statistics of the batch.

    - Values are counted from the first row, so the mean is off by a sum's error of their root mean
      square Q, and by the rounding of the mean itself.
    - Welford's variance is off by a sum's error of Q times the deviation (Chan, Golub and LeVeque,
      1983), and by the square of the mean's error.
    - All else follows from the derivative of each operation with respect to its operands.
    """
    x = batch.x
    weight = batch.weight
    dz = batch.dz
    rows = x.shape[0]
    error = summing(rows)
    stored = batch.storage.relative
    smallest = batch.storage.smallest
    mean = x.sum(0) / rows
    variance = ((x - mean) ** 2).sum(0) / rows
    apart = (variance + (mean - x[0]) ** 2) ** 0.5
    of_mean = error * apart + FLOAT32 * abs(mean)
    of_variance = error * apart * variance**0.5 + (error * apart) ** 2
    relative = of_variance / (variance + batch.eps)
    of_scale = relative / 2 * (1 - relative) ** -1.5 + 4 * FLOAT32
    rstd = (variance + batch.eps) ** -0.5
    xhat = (x - mean) * rstd
    of_xhat = of_mean * rstd + abs(xhat) * (of_scale + FLOAT32)

    z = xhat * weight + batch.bias + batch.residual
    parts = abs(xhat * weight) + abs(batch.bias) + abs(batch.residual)
    of_z = abs(weight) * of_xhat + 4 * FLOAT32 * parts

    weight_gradient = (dz * xhat).sum(0)
    bias_gradient = dz.sum(0)
    of_bias_gradient = error * abs(dz).sum(0)
    of_weight_gradient = error * abs(dz * xhat).sum(0) + (abs(dz) * of_xhat).sum(0)
    level = bias_gradient / rows
    slope = weight_gradient / rows
    dx = weight * rstd * (dz - level - xhat * slope)
    of_rest = of_bias_gradient / rows + abs(xhat) * of_weight_gradient / rows + of_xhat * abs(slope)
    of_rest = of_rest + 6 * FLOAT32 * (abs(dz) + abs(level) + abs(xhat * slope))
    of_dx = abs(weight) * rstd * of_rest + abs(dx) * (of_scale + 2 * FLOAT32)
    return Bounds(
        mean=of_mean,
        rstd=rstd * of_scale,
        variance=of_variance + 4 * FLOAT32 * variance,
        y=of_z + stored * (abs(z) + of_z) + smallest,
        dx=of_dx + stored * (abs(dx) + of_dx) + smallest,
        weight_gradient=of_weight_gradient,
        bias_gradient=of_bias_gradient,
    )
