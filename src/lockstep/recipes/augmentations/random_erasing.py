"""Random erasing: rectangles are filled with a colour or with noise, in some images."""

import math
from collections.abc import Iterator
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.kinds import Colour, Deviation, Fraction, Range

_ATTEMPTS = 10
"""Number of times that the sides of a rectangle are drawn until it fits, as in torchvision and
timm."""
_NUMBERS = 2 * _ATTEMPTS + 6
"""Random numbers of a rectangle: its sides, its place, its colour and the key of its noise."""
_QUANTILES = 2**16


class Rectangle(NamedTuple):
    """A rectangle that is erased. Its numbers are from 0 to 1."""

    height: float
    """Share of the image's height."""
    width: float
    """Share of the image's width."""
    top: float
    """Its place among those where it fits, from top to bottom."""
    left: float
    """Its place among those where it fits, from left to right."""
    colour: tuple[float, ...]
    """Quantiles of red, green and blue."""
    key: int
    """Key of the noise."""

    def find_place(self, size: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width in pixels, in an image of this size."""
        # A side that rounds to the whole image is a pixel shorter: no image is erased whole.
        height = min(round(self.height * size), size - 1)
        width = min(round(self.width * size), size - 1)
        top = int(self.top * (size - height + 1))
        left = int(self.left * (size - width + 1))
        return top, left, height, width


class RandomErasing(Augmentation):
    """Erase rectangles (arXiv:1708.04896; `RandomErasing` of torchvision and timm).

    torchvision and timm fill normalised pixels. This class fills uint8: fills are rounded by half a
    level at most (0.009 standard deviations), and normal values beyond 0 and 255 become 0 and 255
    (2.9 % of red, 2.8 % of green and 3.9 % of blue values).
    """

    probability: Fraction = 0.5
    """Probability that rectangles of an image are erased."""
    area: Range = (0.02, 1 / 3)
    """Range of the erased area, as a share of the image's area. It is divided among the rectangles.
    torchvision has 0.33 instead of 1/3."""
    aspect: Range = (0.3, 1 / 0.3)
    """Range of a rectangle's aspect ratio, height over width. Its logarithm is drawn uniformly.
    torchvision has 3.3 instead of 1/0.3."""
    count: Annotated[int, Field(ge=1, le=100)] = 1
    """Largest number of rectangles in an image. The number is drawn from 1 to this (timm's
    `--recount`)."""
    fill: Literal["mean", "colour", "noise"] = "mean"
    """What rectangles are filled with. "mean": `mean`, which is 0 when it is normalised (timm's
    `const`, torchvision's 0). "colour": a normal colour for each rectangle (timm's `rand`).
    "noise": a normal colour for each pixel (timm's `pixel`, torchvision's `random`)."""
    mean: Colour = (123.675, 116.28, 103.53)
    """Mean of red, green and blue, as `mean` of the recipe."""
    std: Deviation = (58.395, 57.12, 57.375)
    """Standard deviation of red, green and blue, as `std` of the recipe."""

    @field_validator("area")
    @classmethod
    def _check_area(cls, area: tuple[float, float]) -> tuple[float, float]:
        if area[1] > 1:
            raise ValueError("expected shares of the image's area, from 0 to 1")
        return area

    @property
    def numbers(self) -> int:
        """Return those that decide whether and how many, and those of each rectangle."""
        return 2 + _NUMBERS * self.count

    def draw(self, numbers: list[float]) -> list[Rectangle]:
        """Return the rectangles to erase."""
        applies, share, *others = numbers
        if applies >= self.probability:
            return []
        count = 1 + int(share * self.count)
        return list(self._draw_rectangles(count, np.reshape(others, (-1, _NUMBERS)).tolist()))

    def _draw_rectangles(self, count: int, rows: list[list[float]]) -> Iterator[Rectangle]:
        """Yield the rectangles of an image that fit into it."""
        smallest, largest = self.area
        low, high = np.log(self.aspect)
        for top, left, red, green, blue, key, *sides in rows[:count]:
            for area, shape in zip(sides[::2], sides[1::2], strict=True):
                area = (smallest + (largest - smallest) * area) / count
                # The last bit of exp can differ between NumPy builds. Rounded to float32, the value
                # is the same.
                aspect = float(np.float32(np.exp(low + (high - low) * shape)))
                height = math.sqrt(area * aspect)
                width = math.sqrt(area / aspect)
                if height < 1 and width < 1:
                    yield Rectangle(height, width, top, left, (red, green, blue), int(key * 2**53))
                    break

    def apply(self, pixels: np.ndarray, parameters: list[Rectangle]) -> np.ndarray:
        """Return the image with filled rectangles."""
        for rectangle in parameters:
            top, left, height, width = rectangle.find_place(len(pixels))
            self._fill(pixels[top : top + height, left : left + width], rectangle)
        return pixels

    @property
    def mean_levels(self) -> np.ndarray:
        """The mean as a colour: uint8 [3]."""
        return np.rint(np.clip(self.mean, 0, 255)).astype(np.uint8)

    def _fill(self, area: np.ndarray, rectangle: Rectangle) -> None:
        if self.fill == "mean":
            area[:] = self.mean_levels
            return
        if self.fill == "colour":
            drawn = np.array(rectangle.colour) * _QUANTILES
        else:
            bits = np.random.Philox(key=rectangle.key).random_raw(-(-area.size // 4))
            drawn = bits.astype("<u8").view("<u2")[: area.size].reshape(area.shape)
        for channel in range(3):
            levels = _normal_levels(self.mean[channel], self.std[channel])
            area[..., channel] = levels[drawn[..., channel].astype(np.uint16)]


@lru_cache(maxsize=16)
def _normal_levels(mean: float, std: float) -> np.ndarray:
    """Return the levels of equally likely normal values, in rising order: uint8 [65536].

    Values are rounded, and clipped at 0 and 255. A table has the same bits everywhere, and is many
    times faster than drawing normal numbers.
    """
    normal = NormalDist(mean, std)
    # The share of values that are rounded to a level or a lower one.
    shares = [normal.cdf(level + 0.5) for level in range(255)]
    quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return np.searchsorted(shares, quantiles).astype(np.uint8)
