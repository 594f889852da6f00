"""Weights and inputs rounded to int8, by the rules of `lockstep.models.quantisation`."""

from typing import Any

import jax
import jax.numpy as jnp

from lockstep.models.quantisation import LARGEST, LOWEST, SMALLEST_SCALE

Array = Any


def fake_quantise(x: Array, scale: Array) -> Array:
    """Return float32 x rounded to int8 multiples of the scale, float32 []. The gradient passes
    where x is within the limits of the integers."""
    return _fake_quantise(x, scale)


def quantise_weight(weight: Array) -> Array:
    """Return a float32 weight [..., out] rounded to int8 multiples of a scale for each output
    channel. All of its gradient passes: none is limited."""
    return _quantise_weight(weight)


def _round_input(x: Array, scale: Array) -> tuple[Array, Array]:
    """Return the multiples, and where x is within the limits."""
    q = jnp.round(x / scale)
    limited = jnp.clip(q, LOWEST, LARGEST)
    return limited * scale, q == limited


def _round_weight(weight: Array) -> Array:
    largest = jnp.max(jnp.abs(weight), axis=range(weight.ndim - 1))
    scale = jnp.maximum(largest / LARGEST, SMALLEST_SCALE)
    return jnp.round(weight / scale) * scale


_fake_quantise = jax.custom_vjp(lambda x, scale: _round_input(x, scale)[0])
_fake_quantise.defvjp(
    _round_input, lambda is_within, gradient: (jnp.where(is_within, gradient, 0), None)
)
_quantise_weight = jax.custom_vjp(_round_weight)
_quantise_weight.defvjp(
    lambda weight: (_round_weight(weight), None), lambda _, gradient: (gradient,)
)
