"""How the images of a step are mixed with others: by MixUp, by CutMix, or some by one and some by
the other.

An image that MixUp mixes is c * image + (1 - c) * partner (arXiv:1710.09412). One that CutMix mixes
has the pixels of its partner within a box (arXiv:1905.04899). Both are described by a weight of the
image itself for every pixel: c everywhere, or 0 within the box and 1 outside.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.recipes.philox import Numbers, Purpose, uniform
from lockstep.recipes.recipe import Recipe


@dataclass(frozen=True)
class Mixing:
    """How N images are mixed, in the form that batches use."""

    coefficients: np.ndarray
    """float32 [N]: MixUp's weight of the image itself; 1 where MixUp does not mix it."""
    partners: np.ndarray
    """int64 [N]: what the image is mixed with, as an index into these images."""
    target_coefficients: np.ndarray | None = None
    """float32 [N]: weight of the image's own label in its target: MixUp's coefficient, or the share
    of the pixels outside of CutMix's box. None without CutMix: as `coefficients`."""
    boxes: np.ndarray | None = None
    """int32 [N, 4]: top, left, height and width of CutMix's box in pixels of the square; all 0
    where CutMix does not mix the image. None without CutMix."""


def draw_mixing(
    recipe: Recipe, size: int, step_numbers: Numbers, numbers: Numbers
) -> Mixing | None:
    """Return how a unit of a step is mixed; None if the recipe mixes no images.

    `numbers` are those of the unit's positions, `step_numbers` those of the first position of the
    step, for what all images of a step share. `size` is height and width of the images.
    """
    if not recipe.mixes_images:
        return None
    drawn = numbers if recipe.mixup_coefficient == "sample" else step_numbers
    kind = uniform(drawn(Purpose.MIX_KIND))
    is_mixed = kind[:, 0] < recipe.mix_probability
    is_cut = is_mixed & (kind[:, 1] < recipe.cutmix_share)
    coefficients = np.ones(drawn.count, np.float32)
    if recipe.mixup_alpha:
        mixed = _draw_beta(recipe.mixup_alpha, drawn, Purpose.MIXUP_COEFFICIENT)
        coefficients = np.where(is_mixed & ~is_cut, mixed, coefficients)
    repeats = numbers.count // drawn.count
    partners = _draw_partners(recipe, numbers)
    if not recipe.cutmix_alpha:
        return Mixing(np.repeat(coefficients, repeats), partners)
    boxes = _draw_boxes(recipe.cutmix_alpha, size, drawn) * is_cut[:, None]
    outside = 1 - boxes[:, 2] * boxes[:, 3] / size**2
    target_coefficients = np.where(is_cut, outside.astype(np.float32), coefficients)
    return Mixing(
        np.repeat(coefficients, repeats),
        partners,
        np.repeat(target_coefficients, repeats),
        np.repeat(boxes.astype(np.int32), repeats, axis=0),
    )


def _draw_beta(alpha: float, numbers: Numbers, purpose: Purpose) -> np.ndarray:
    """Return numbers from Beta(alpha, alpha) by Jöhnk's method: float32 [N]."""
    result = np.full(numbers.count, np.nan)
    attempt = 0
    while np.isnan(result).any():
        u = uniform(numbers(purpose, attempt)) ** (1 / alpha)
        for x, y in ((u[:, 0], u[:, 1]), (u[:, 2], u[:, 3])):
            accepted = np.isnan(result) & (x + y <= 1) & (x + y > 0)
            result[accepted] = (x / np.where(accepted, x + y, 1))[accepted]
        attempt += 1
    return result.astype(np.float32)


def _draw_boxes(alpha: float, size: int, numbers: Numbers) -> np.ndarray:
    """Return boxes: int64 [N, 4] (top, left, height, width).

    With c from Beta(alpha, alpha), a box has the share 1 - c of the square's area and its centre at
    a random pixel. What lies outside of the square is cut off. From its centre it reaches equally
    far in all directions, a whole number of pixels (the paper's code; torchvision).
    """
    coefficients = _draw_beta(alpha, numbers, Purpose.CUTMIX_COEFFICIENT).astype(np.float64)
    reach = (np.floor(size * np.sqrt(1 - coefficients)) // 2).astype(np.int64)[:, None]
    centres = np.floor(size * uniform(numbers(Purpose.CUTMIX_BOX))[:, :2]).astype(np.int64)
    first = np.maximum(centres - reach, 0)
    end = np.minimum(centres + reach, size)
    return np.concatenate([first, end - first], axis=1)


def _draw_partners(recipe: Recipe, numbers: Numbers) -> np.ndarray:
    if recipe.mixup_pairing == "reverse":
        return np.arange(numbers.count)[::-1].copy()
    return np.argsort(numbers(Purpose.MIXUP_PARTNER)[:, 0], kind="stable")


def weigh_pixels(
    coefficients: np.ndarray, boxes: np.ndarray | None, height: int, width: int
) -> np.ndarray:
    """Return the weight of an image itself in each of its pixels: float [N, H, W], in the dtype of
    `coefficients`."""
    whole = np.broadcast_to(coefficients[:, None, None], (len(coefficients), height, width))
    if boxes is None:
        return whole
    top, left, tall, wide = (column[:, None, None] for column in boxes.T)
    rows = np.arange(height)[:, None]
    columns = np.arange(width)
    is_inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return np.where(is_inside, coefficients.dtype.type(0), whole)
