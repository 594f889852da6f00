"""Define how results of backends are compared, and how far they may differ."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Bound:
    """The largest difference that rounding explains."""

    value: float
    why: str


BOUNDS: dict[str, Bound] = {
    # float32 against float64 (see `distance`). float32 has 24 bits: one operation is off by 6e-8.
    "logits": Bound(5e-6, "a dozen layers, each a sum of up to 600 products"),
    "full logits": Bound(
        5e-5, "50 to 100 layers of up to 4,608 products; so any two engines are within 1e-4"
    ),
    "full loss": Bound(5e-5, "the logits' rounding through a logarithm"),
    "full statistics": Bound(2e-4, "means of values after up to 100 layers"),
    "steady gradient": Bound(
        3e-2,
        "rounding is 1e-5, but 7e-3 was measured where it moves the maximum of a pooling window,"
        " and 1.5e-2 with AVX2 alone, which splits sums differently from AVX-512",
    ),
    "loss": Bound(1e-5, "the logits' rounding through a logarithm"),
    "statistics": Bound(1e-5, "means over at least 16 values"),
    "gradient": Bound(
        1e-2,
        "rounding is 1e-5, but a gradient jumps by about 1e-3 where it switches a ReLU or moves a"
        " maximum",
    ),
    "trajectory": Bound(2e-2, "of the distance moved in 20 small steps: a few such jumps"),
    "decay": Bound(1e-3, "the difference of two velocities, some much larger than what decay adds"),
    "momentum": Bound(1e-5, "the difference of two velocities twice as large"),
    "optimizer": Bound(1e-5, "a few operations with a gradient, some of which cancel"),
    "update": Bound(1e-3, "the difference of two weights, hundreds of times larger than a step"),
    "weights": Bound(
        1e-2, "of the distance moved: hundreds of times the resolution of weights that hardly move"
    ),
    "direction": Bound(1e-2, "1 - cosine of a gradient in which rounding switches some ReLUs"),
    "exact": Bound(0.0, "counts and copies are not rounded"),
    "operation": Bound(5e-7, "a few operations"),
    # Lower precision against float64: bf16 has 8 bits (4e-3 a layer, in random directions), fp16 11
    # (5e-4).
    "bf16 logits": Bound(5e-2, "8 bits a layer"),
    "fp16 logits": Bound(6e-3, "11 bits a layer"),
    "bf16 loss": Bound(2e-2, "the logits' rounding through a logarithm"),
    "fp16 loss": Bound(3e-3, "the logits' rounding through a logarithm"),
    "bf16 statistics": Bound(5e-2, "the activations' rounding"),
    "fp16 statistics": Bound(6e-3, "the activations' rounding"),
    "bf16 direction": Bound(0.25, "of the whole gradient: the fewer bits, the more ReLUs switch"),
    "fp16 direction": Bound(0.03, "of the whole gradient: the fewer bits, the more ReLUs switch"),
    "scaled gradient": Bound(
        1e-2, "a power of two is exact in fp16, except for values below 6e-8 without it"
    ),
    "pixels": Bound(
        3,
        "of 255: versions of libjpeg-turbo and OpenCV may round differently; equal versions do not"
        " differ",
    ),
    # Weights and inputs in int8, float32 against float64:
    "quantised": Bound(
        5e-3,
        "rounding is 1e-6, but where it decides a rounding to int8 the value moves by a whole"
        " scale",
    ),
    "bf16 quantised": Bound(0.2, "the rounding to 8 bits decides many roundings to int8"),
    "quantised direction": Bound(
        0.1, "as the direction, and equal integers share the maximum of a pooling window"
    ),
    # A backend against itself, with sums in another order:
    "compiled": Bound(1e-2, "as the gradient: the compiler fuses and reorders"),
    "ranks": Bound(1e-5, "weights after 4 small steps"),
}


def distance(actual: Arrays | np.ndarray, expected: Arrays | np.ndarray) -> float:
    """Return the largest difference relative to the largest expected value, the worst over all
    tensors.

    The difference of a tensor of almost zeros is relative to a hundredth of the largest value of
    all. NaN is infinitely far.
    """
    if isinstance(expected, np.ndarray) or isinstance(actual, np.ndarray):
        actual = {"": np.asarray(actual)}
        expected = {"": np.asarray(expected)}
    assert actual.keys() == expected.keys()
    sizes = {name: np.abs(value).max() for name, value in expected.items()}
    floor = max(sizes.values()) / 100 or np.finfo(np.float32).tiny
    differences = []
    for name, value in expected.items():
        differences.append(largest(actual[name] - value) / float(max(sizes[name], floor)))
    return max(differences)


def largest(difference: np.ndarray) -> float:
    """Return the largest absolute value. NaN counts as infinity, because it compares false with
    every bound."""
    return float(np.nan_to_num(np.abs(difference), nan=np.inf).max())


def angle(actual: Arrays, expected: Arrays) -> float:
    """Return 1 - cosine between two sets of tensors, each taken as one vector."""
    a = np.concatenate([actual[name].ravel().astype(np.float64) for name in expected])
    b = np.concatenate([value.ravel().astype(np.float64) for value in expected.values()])
    # Infinity has no direction: the result is NaN, which is outside all bounds.
    with np.errstate(invalid="ignore"):
        return float(1 - a @ b / np.sqrt((a @ a) * (b @ b)))
