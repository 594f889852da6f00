"""Where a resize samples its source, and the resizes that neither OpenCV nor Pillow has.

A position in the source is in pixels; pixel i covers i to i + 1. Along an axis, m output pixels
share a stretch of the source evenly, and the centre of each share is sampled. Only this stretch
differs between the values of `Recipe.eval_sampling`. Outside the source its border continues.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image

from lockstep.data.decoding.jpeg import Window

Stretch = tuple[float, float]
"""Start and length of what an axis of the output shows, in pixels of the source. It may reach
beyond the source."""
_CUBIC = -0.75
"""OpenCV's a of the cubic."""


def stretches(
    source: Sequence[int], resized: Sequence[int], offset: Sequence[int], size: int, sampling: str
) -> tuple[Stretch, Stretch]:
    """Return what a square of `size` pixels at `offset` of a resized image shows of a source:
    vertically, horizontally.

    `source`, `resized` and `offset` are pairs for height and width; `sampling` is a value of
    `Recipe.eval_sampling`.

    >>> stretches((354, 500), (256, 362), (0, 0), 256, "half_pixel_symmetric")
    ((0.0, 354.0), (-0.2890625, 354.0))
    """
    shared = min(source) / min(resized)

    def stretch(axis: int) -> Stretch:
        length = source[axis]
        wanted = resized[axis]
        step = length / wanted
        start = 0.0
        if sampling == "half_pixel_symmetric":
            step = shared
            start = length / 2 - wanted * shared / 2
        elif sampling == "asymmetric":
            # The centre of the first share is the centre of the first pixel.
            start = 0.5 - 0.5 * step
        return start + offset[axis] * step, size * step

    return stretch(0), stretch(1)


def crop_to_needed(
    window: Window, where: tuple[Stretch, Stretch], size: int
) -> tuple[Window, tuple[Stretch, Stretch]]:
    """Return the part of a window that samples of a square need, and the stretches of the square in
    that part.

    At most 16 pixels around a sample are weighed: two on each side of it.
    """
    corner = []
    extent = []
    moved = []
    for stretch, first, length in zip(where, window[:2], window[2:], strict=True):
        at = _positions(stretch, size)
        start = min(max(math.floor(at[0]) - 1, 0), length - 1)
        end = min(max(math.floor(at[-1]) + 3, start + 1), length)
        corner.append(first + start)
        extent.append(end - start)
        moved.append((stretch[0] - start, stretch[1]))
    return (corner[0], corner[1], extent[0], extent[1]), (moved[0], moved[1])


def _positions(stretch: Stretch, size: int) -> np.ndarray:
    """Return where the pixels of a square sample along an axis: float64 [size], 0 is the centre of
    the first pixel."""
    start, length = stretch
    return start + (np.arange(size) + 0.5) * (length / size) - 0.5


def sample_square(
    part: np.ndarray, where: tuple[Stretch, Stretch], size: int, interpolation: str
) -> np.ndarray:
    """Return the square that shows two stretches of an image, not filtered: uint8 [size, size, 3].

    "bilinear" weighs 4 pixels and "bicubic" 16, as OpenCV does. The weights are not rounded.
    """
    taps = _cubic_taps if interpolation == "bicubic" else _linear_taps
    height, width = part.shape[:2]
    rows = taps(_positions(where[0], size), height)
    columns = taps(_positions(where[1], size), width)
    # Both directions gather whole rows, of a transposed copy the second time. Single pixels take
    # several times longer.
    pixels = cv2.transpose(_blend(cv2.transpose(_blend(part, rows)), columns))
    return np.clip(pixels + np.float32(0.5), 0, 255).astype(np.uint8)


Taps = list[tuple[np.ndarray, np.ndarray]]
"""Index of a source pixel and its weight, for each output pixel: int64 [count] and float32 [count,
1, 1]."""


def _linear_taps(at: np.ndarray, length: int) -> Taps:
    first = np.floor(at)
    share = at - first
    return _taps(first, [1 - share, share], length)


def _cubic_taps(at: np.ndarray, length: int) -> Taps:
    first = np.floor(at)
    a = _CUBIC
    x = at - first

    def weigh_far(t: np.ndarray) -> np.ndarray:
        return a * t * (t - 1) ** 2

    def weigh_near(t: np.ndarray) -> np.ndarray:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1

    weights = [weigh_far(x), weigh_near(x), weigh_near(1 - x), weigh_far(1 - x)]
    return _taps(first - 1, weights, length)


def _taps(first: np.ndarray, weights: list[np.ndarray], length: int) -> Taps:
    taps = []
    for i, weight in enumerate(weights):
        index = np.clip(first + i, 0, length - 1).astype(np.int64)
        taps.append((index, weight.astype(np.float32)[:, None, None]))
    return taps


def _blend(pixels: np.ndarray, taps: Taps) -> np.ndarray:
    """Return the weighted sums of rows: float32 [count, width, 3]."""
    (index, weight), *others = taps
    total: np.ndarray = pixels[index] * weight
    for index, weight in others:
        total += pixels[index] * weight
    return total


def filter_square(
    part: np.ndarray, where: tuple[Stretch, Stretch], size: int, filtering: Image.Resampling
) -> np.ndarray:
    """Return the square that shows two stretches of an image, by one of Pillow's filters: uint8
    [size, size, 3]."""
    (top, height), (left, width) = where
    # The filter reaches up to two output pixels beyond the stretch.
    margin = math.ceil(2 * max(height, width, size) / size) + 2
    framed = cv2.copyMakeBorder(part, margin, margin, margin, margin, cv2.BORDER_REPLICATE)
    box = (left + margin, top + margin, left + width + margin, top + height + margin)
    return np.asarray(Image.fromarray(framed).resize((size, size), filtering, box))
