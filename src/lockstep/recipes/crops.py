"""Where training images are cropped: one function for each value of `Recipe.crop`, drawn by
position.

An image is cropped in three steps: window -> resize -> square at an offset.
"""

from collections.abc import Callable

import numpy as np

from lockstep.recipes.philox import Purpose, uniform
from lockstep.recipes.recipe import Recipe

Numbers = Callable[..., np.ndarray]
"""Called with a purpose, and with the number of the attempt if it is not the first one. Returns
random numbers for every image: uint64 [N, 4]."""
Crops = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Windows, sizes after the resize, and offsets, as in `BatchPlan`."""


def draw_crops(recipe: Recipe, side: int, sizes: np.ndarray, numbers: Numbers) -> Crops:
    """Return the crops of training images of these heights and widths, int [N, 2], to squares with
    this side."""
    return _CROPS[recipe.crop](recipe, side, sizes.astype(np.int64), numbers)


def resize_shorter_sides(sizes: np.ndarray, size: int) -> np.ndarray:
    """Return heights and widths after a resize of the shorter side to `size`: int64 [N, 2], like
    `sizes`. The longer side is rounded down, as by torchvision."""
    return size * sizes // sizes.min(axis=1, keepdims=True)


def whole_windows(sizes: np.ndarray) -> np.ndarray:
    """Return windows of whole images of these heights and widths: int32 [N, 4]."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(np.int32)


def _resize_random_windows(recipe: Recipe, side: int, sizes: np.ndarray, numbers: Numbers) -> Crops:
    return random_windows(recipe, sizes, numbers), *_fill_square(side, len(sizes))


def _squash(recipe: Recipe, side: int, sizes: np.ndarray, numbers: Numbers) -> Crops:
    return whole_windows(sizes), *_fill_square(side, len(sizes))


def _fill_square(side: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    resized = np.full((count, 2), side, np.int32)
    return resized, np.zeros_like(resized)


def _cut_randomly(recipe: Recipe, side: int, sizes: np.ndarray, numbers: Numbers) -> Crops:
    resized = resize_shorter_sides(sizes, side)
    places = resized + 2 * recipe.crop_padding - side + 1
    offsets = np.floor(uniform(numbers(Purpose.CROP)[:, 2:]) * places) - recipe.crop_padding
    return whole_windows(sizes), resized.astype(np.int32), offsets.astype(np.int32)


def _cut_centre(recipe: Recipe, side: int, sizes: np.ndarray, numbers: Numbers) -> Crops:
    resized = resize_shorter_sides(sizes, side)
    offsets = np.rint((resized - side) / 2)
    return whole_windows(sizes), resized.astype(np.int32), offsets.astype(np.int32)


_CROPS: dict[str, Callable[[Recipe, int, np.ndarray, Numbers], Crops]] = {
    "random_resized": _resize_random_windows,
    "random": _cut_randomly,
    "centre": _cut_centre,
    "squash": _squash,
}


def random_windows(recipe: Recipe, sizes: np.ndarray, numbers: Numbers) -> np.ndarray:
    """Return a random crop window for every image: int32 [N, 4] (top, left, height, width).

    The share of the area is uniform in `crop_area`, the logarithm of the aspect ratio is uniform in
    `crop_aspect`, and the place is uniform where the window fits. If no window fits in
    `crop_attempts` attempts, the window is the largest centred one with an allowed aspect ratio
    (arXiv:1409.4842; torchvision, DALI).
    """
    heights = sizes[:, 0].astype(np.int64)
    widths = sizes[:, 1].astype(np.int64)
    windows = _centre_windows(recipe, heights, widths)
    waiting = np.ones(len(sizes), bool)
    smallest, largest = recipe.crop_area
    low, high = np.log(recipe.crop_aspect)
    for attempt in range(recipe.crop_attempts):
        u = uniform(numbers(Purpose.CROP, attempt))
        share = smallest + (largest - smallest) * u[:, 0]
        area = heights * widths * share
        # The last bit of exp can differ between NumPy builds. Rounded to float32, the value is the
        # same.
        aspect = np.exp(low + (high - low) * u[:, 1]).astype(np.float32).astype(np.float64)
        height = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        width = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        fits = waiting & (height > 0) & (height <= heights) & (width > 0) & (width <= widths)
        top = np.floor(u[:, 2] * (heights - height + 1)).astype(np.int64)
        left = np.floor(u[:, 3] * (widths - width + 1)).astype(np.int64)
        windows[fits] = np.stack([top, left, height, width], axis=1)[fits]
        waiting &= ~fits
        if not waiting.any():
            break
    return windows.astype(np.int32)


def _centre_windows(recipe: Recipe, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    narrowest, widest = recipe.crop_aspect
    height = np.minimum(heights, np.maximum(np.rint(widths / narrowest), 1)).astype(np.int64)
    width = np.minimum(widths, np.maximum(np.rint(heights * widest), 1)).astype(np.int64)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)
