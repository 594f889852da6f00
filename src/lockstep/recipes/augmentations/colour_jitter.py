"""Colour jitter: brightness, contrast, saturation and hue change randomly, in a random order."""

from itertools import permutations
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.kinds import Fraction, Strength
from lockstep.recipes.pixel_operators import OPERATORS, Resampling

Changes = list[tuple[str, float]]
"""What is changed, in this order, with its factor; the share of the circle for "hue"."""

_OPERATORS = {"brightness": "brightness", "contrast": "contrast", "saturation": "colour"}
_ORDERS = list(permutations((*_OPERATORS, "hue")))
NO_GEOMETRY = Resampling("nearest", (0, 0, 0))


class ColourJitter(Augmentation):
    """Change brightness, contrast, saturation and hue, with Pillow's bits (torchvision's
    `ColorJitter`, which timm uses too)."""

    probability: Fraction = 1.0
    """Probability that an image is changed."""
    brightness: Strength = 0.4
    """The factor of the brightness is drawn uniformly from 1 - this to 1 + this, and at least 0. 0
    leaves the brightness out."""
    contrast: Strength = 0.4
    """Range of the factor of the contrast, as `brightness`."""
    saturation: Strength = 0.4
    """Range of the factor of the saturation, as `brightness`."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hues are rotated by a share of the circle that is drawn uniformly from -this to this. 0
    leaves the hue out, which takes most of the time."""

    @property
    def numbers(self) -> int:
        """Return 6: whether the image is changed, the order, and four factors."""
        return 6

    def draw(self, numbers: list[float]) -> Changes:
        """Return the changes of an image."""
        applies, order, brightness, contrast, saturation, hue = numbers
        if applies >= self.probability:
            return []
        values = {
            "brightness": _draw_factor(self.brightness, brightness),
            "contrast": _draw_factor(self.contrast, contrast),
            "saturation": _draw_factor(self.saturation, saturation),
            "hue": self.hue * (2 * hue - 1),
        }
        names = _ORDERS[int(order * len(_ORDERS))]
        return [(name, values[name]) for name in names if getattr(self, name)]

    def apply(self, pixels: np.ndarray, parameters: Changes) -> np.ndarray:
        """Return the image after all changes."""
        for name, value in parameters:
            if name == "hue":
                pixels = rotate_hue(pixels, value)
            else:
                pixels = OPERATORS[_OPERATORS[name]](pixels, value, NO_GEOMETRY)
        return pixels


def _draw_factor(width: float, number: float) -> float:
    smallest = max(1 - width, 0.0)
    return smallest + (1 + width - smallest) * number


def rotate_hue(pixels: np.ndarray, share: float) -> np.ndarray:
    """Return an image whose hues are rotated by a share of the circle, -0.5 to 0.5.

    The hue is one of 256 of Pillow's HSV. Like torchvision, it adds the share times 255, without
    its fraction.
    """
    colours = np.array(Image.fromarray(pixels).convert("HSV"))
    colours[:, :, 0] += np.uint8(int(share * 255) % 256)
    return np.asarray(Image.fromarray(colours, "HSV").convert("RGB"))
