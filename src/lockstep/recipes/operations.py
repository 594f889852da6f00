"""Random operations: an operator, its number and an interpolation, as RandAugment and its relatives
draw them.

torchvision and timm make numbers of magnitudes in different ways. `number_of_torchvision` and
`number_of_timm` give the same numbers as they do, to the last bit.
"""

import math
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.pixel_operators import OPERATORS, Interpolation, Resampling

Level = Annotated[int, Field(ge=0, le=255)]
Fill = tuple[Level, Level, Level]
Interpolations = Literal["nearest", "bilinear", "bicubic", "random"]


class Operation(NamedTuple):
    """What is done to an image once."""

    operator: str
    """A name in `OPERATORS`."""
    number: float
    """Its number: a factor, an angle in degrees, a share of the side ..."""
    interpolation: Interpolation


class Operations(Augmentation):
    """An augmentation that does operations one after the other."""

    interpolation: Interpolations = "nearest"
    """Interpolation of changes of geometry. "random" is "bilinear" or "bicubic", drawn for each
    operation."""
    fill: Fill = (0, 0, 0)
    """Red, green and blue of pixels that come from outside the image."""

    def apply(self, pixels: np.ndarray, parameters: tuple[Operation, ...]) -> np.ndarray:
        """Return the image after all operations."""
        for operator, number, interpolation in parameters:
            how = Resampling(interpolation, self.fill)
            pixels = OPERATORS[operator](pixels, number, how)
        return pixels

    def choose_interpolation(self, number: float) -> Interpolation:
        """Return the interpolation of an operation, drawn by a number in [0, 1) if it is random."""
        if self.interpolation != "random":
            return self.interpolation
        return "bilinear" if number < 0.5 else "bicubic"


# torchvision

LARGEST = {
    "identity": 0,
    "shear_x": 0.3,
    "shear_y": 0.3,
    "move_x_by_share": 150 / 331,
    "move_y_by_share": 150 / 331,
    "rotate": 30,
    "brightness": 0.9,
    "colour": 0.9,
    "contrast": 0.9,
    "sharpness": 0.9,
    "posterise": 4,
    "solarise": 255,
    "autocontrast": 0,
    "equalise": 0,
}
"""The operators of torchvision's RandAugment, with the largest magnitude of each."""
LARGEST_WIDE = {
    "identity": 0,
    "shear_x": 0.99,
    "shear_y": 0.99,
    "move_x": 32,
    "move_y": 32,
    "rotate": 135,
    "brightness": 0.99,
    "colour": 0.99,
    "contrast": 0.99,
    "sharpness": 0.99,
    "posterise": 6,
    "solarise": 255,
    "autocontrast": 0,
    "equalise": 0,
}
"""Those of TrivialAugmentWide."""


def _interpolate(start: float, end: float, index: int, last: int) -> float:
    """Return value `index` of the `last` + 1 values from `start` to `end`, in the float32 numbers
    of `torch.linspace`."""
    step = float((np.float32(end) - np.float32(start)) / np.float32(last))
    if index < (last + 1) // 2:
        return float(np.float32(float(np.float32(start)) + step * index))
    return float(np.float32(float(np.float32(end)) - step * (last - index)))


def number_of_torchvision(
    operator: str, largest: float, index: int, last: int, *, negative: bool
) -> float:
    """Return an operator's number at magnitude `index` of 0 to `last`.

    Changes in both directions have the sign that `negative` says.
    """
    if operator == "posterise":
        return 8 - round(index / (last / largest))
    if operator == "solarise":
        return _interpolate(largest, 0, index, last)
    if operator.endswith("_by_share"):
        magnitude = largest * index / last
    else:
        magnitude = _interpolate(0, largest, index, last)
    if negative:
        magnitude = -magnitude
    if operator in ("brightness", "colour", "contrast", "sharpness"):
        return 1 + magnitude
    # torchvision's shears are angles
    angle = math.radians(math.degrees(math.atan(magnitude)))
    if operator == "shear_x":
        return math.tan(angle)
    if operator == "shear_y":
        return math.sin(angle) / math.cos(angle)
    return magnitude


# timm


def draw_normal(number: float, mean: float, deviation: float) -> float:
    """Return a normal random number made of a uniform one, in float32.

    The last bits of a logarithm can differ between machines. Rounded, the number is the same.
    """
    quantile = NormalDist().inv_cdf(max(number, 2.0**-54))
    return float(np.float32(mean + deviation * quantile))


def number_of_timm(operator: str, share: float, *, negative: bool, increasing: bool) -> float:
    """Return an operator's number at a share of the full magnitude.

    Changes in both directions have the sign that `negative` says. If `increasing`, a larger share
    changes more, for every operator.
    """
    sign = -1 if negative else 1
    if operator in ("shear_x", "shear_y"):
        return sign * (share * 0.3)
    if operator in ("translate_x", "translate_y"):
        return sign * (share * 0.45)
    if operator == "rotate":
        return sign * (share * 30.0)
    if operator == "solarise_add":
        return min(128, int(share * 110))
    if operator == "posterise":
        bits = int(share * 4)
        return max(4 - bits, 0) if increasing else min(bits, 8)
    if operator == "solarise":
        threshold = min(256, int(share * 256))
        return 256 - threshold if increasing else threshold
    if operator in ("brightness", "colour", "contrast", "sharpness"):
        return max(0.1, 1.0 + sign * (share * 0.9)) if increasing else share * 1.8 + 0.1
    return 0
