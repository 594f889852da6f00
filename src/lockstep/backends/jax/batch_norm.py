"""Batch norm by the statistics of a batch, with its gradient."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


class OverRanks(NamedTuple):
    """The ranks whose images are normalised together."""

    add_up: Callable[[Sequence[Array]], list[Array]] = list
    """Returns the sums of arrays over the ranks."""
    ranks: int = 1


ALONE = OverRanks()
"""Every rank normalises its own images."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalise_batch(
    x: Array, scale: Array, bias: Array, epsilon: float, over: OverRanks
) -> tuple[Array, Array, Array]:
    """Return normalised values [N, H, W, C] in the dtype of `x`, and the float32 mean and biased
    variance [C].

    It computes in float32, the variance from distances to the mean: E[x^2] - E[x]^2 loses digits.
    The gradient is that of arXiv:1502.03167; mean and variance have none.
    """
    return _normalise(x, scale, bias, epsilon, over)[0]


def _normalise(
    x: Array, scale: Array, bias: Array, epsilon: float, over: OverRanks
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    count = count_values(x, over)
    wide = x.astype(jnp.float32)
    (mean,) = over.add_up([_sum_channels(wide) / count])
    centred = wide - mean
    (variance,) = over.add_up([_sum_channels(centred * centred) / count])
    inverse = 1 / lax.sqrt(variance + epsilon)
    y = centred * (scale * inverse) + bias
    return (y.astype(x.dtype), mean, variance), (x, scale, mean, inverse)


def _differentiate(
    epsilon: float, over: OverRanks, kept: tuple[Array, ...], d_results: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    x, scale, mean, inverse = kept
    count = count_values(x, over)
    d_y = d_results[0].astype(jnp.float32)
    z = (x.astype(jnp.float32) - mean) * inverse
    d_scale = _sum_channels(d_y * z)
    d_bias = _sum_channels(d_y)
    # The engine adds up the gradients of parameters itself.
    all_scale, all_bias = over.add_up([d_scale, d_bias])
    d_x = (scale * inverse) * (d_y - all_bias / count - z * (all_scale / count))
    return d_x.astype(x.dtype), d_scale, d_bias


normalise_batch.defvjp(_normalise, _differentiate)


def count_values(x: Array, over: OverRanks) -> int:
    """Return the number of values of a channel over all ranks."""
    return x.size // x.shape[-1] * over.ranks


def _sum_channels(x: Array) -> Array:
    return jnp.sum(x, axis=(0, 1, 2))
