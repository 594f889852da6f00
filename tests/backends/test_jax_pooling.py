"""The JAX backend's max pool for CPUs, against XLA's own."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.backends.jax.model import pool_largest


def pool_plainly(x: Any, stride: int, padding: list[tuple[int, int]]) -> Any:
    pads = [(0, 0), *padding, (0, 0)]
    sides = ((1, 3, 3, 1), (1, stride, stride, 1))
    return jax.lax.reduce_window(x, np.float32(-np.inf), jax.lax.max, *sides, pads)


@pytest.mark.parametrize(("stride", "before", "after"), [(2, 1, 1), (2, 0, 1), (1, 1, 1)])
def test_largest_values_and_gradients_equal_xlas(stride: int, before: int, after: int) -> None:
    random = np.random.default_rng(0)
    # Few values, so that windows have equal ones, and gradients whose sums are exact
    x = random.integers(0, 3, (2, 8, 7, 4)).astype(np.float32)

    def differentiate(pool: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray]:
        y, back = jax.vjp(jax.jit(lambda x: pool(x, stride, [(before, after)] * 2)), x)
        (d_x,) = back(np.arange(y.size, dtype=np.float32).reshape(y.shape))
        return np.asarray(y), np.asarray(d_x)

    for value, right in zip(differentiate(pool_largest), differentiate(pool_plainly), strict=True):
        np.testing.assert_array_equal(value, right)


def test_not_a_number_is_the_largest() -> None:
    x = np.zeros((1, 6, 6, 1), np.float32)
    x[0, 2, 3] = np.nan
    pooled = [pool(x, 2, [(1, 1), (1, 1)]) for pool in (pool_largest, pool_plainly)]
    np.testing.assert_array_equal(*pooled)
