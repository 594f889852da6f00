"""Grouped convolutions of the JAX backend, in the form for CPUs, against XLA's own."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.backends.jax.convolutions import convolve, list_cpu_options

SYMMETRIC = [(1, 1), (1, 1)]
SAME = [(0, 1), (0, 1)]
CASES = {
    "one pack": (8, 16, 4, 1, SYMMETRIC),
    "two packs": (64, 32, 16, 1, SYMMETRIC),
    "a group is a pack": (72, 4, 2, 1, SYMMETRIC),
    "stride 2": (8, 8, 4, 2, SYMMETRIC),
    "stride 2 with SAME": (8, 8, 4, 2, SAME),
    "pixels at the edge that no window reaches": (8, 8, 4, 2, [(0, 0), (0, 0)]),
}


def convolve_plainly(
    x: Any, kernel: Any, strides: tuple[int, int], padding: list[tuple[int, int]], groups: int
) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_grouped_convolution_and_its_gradients_equal_those_of_xla(case: str) -> None:
    channels, outputs, groups, stride, padding = CASES[case]
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        # Small integers, whose sums are exact in every order
        return random.integers(-4, 5, shape).astype(np.float32)

    x = draw(2, 6, 8, channels)
    kernel = draw(3, 3, channels // groups, outputs)

    def differentiate(convolve: Callable[..., Any]) -> list[np.ndarray]:
        def compute(x: Any, kernel: Any) -> Any:
            return convolve(x, kernel, (stride, stride), padding, groups)

        y, back = jax.vjp(jax.jit(compute), x, kernel)
        weights = np.arange(y.size, dtype=np.float32).reshape(y.shape) % 7
        return [np.asarray(value) for value in (y, *back(weights))]

    expected = differentiate(convolve_plainly)
    for value, right in zip(differentiate(convolve), expected, strict=True):
        np.testing.assert_array_equal(value, right)


def test_xla_has_the_option_that_convolutions_on_cpus_need() -> None:
    def compute(x: Any, kernel: Any) -> Any:
        return convolve(x, kernel, (1, 1), SYMMETRIC, 1)

    x = jax.ShapeDtypeStruct((8, 56, 56, 64), np.float32)
    lowered = jax.jit(compute).lower(x, jax.ShapeDtypeStruct((3, 3, 64, 64), np.float32))
    assert "ynn_fusion" in lowered.compile().as_text()
    assert "ynn_fusion" not in lowered.compile(compiler_options=list_cpu_options()).as_text()
