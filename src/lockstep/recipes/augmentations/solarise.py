"""Solarise: bright pixels are inverted, in some images."""

from typing import Annotated

import cv2
import numpy as np
from pydantic import Field

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.kinds import Fraction


class Solarise(Augmentation):
    """Invert the values at or above a threshold (`RandomSolarize` of torchvision)."""

    probability: Fraction = 0.5
    """Probability that an image is solarised."""
    threshold: Annotated[int, Field(ge=0, le=256)] = 128
    """The smallest value, of 0 to 255, that is inverted. 0 inverts the image, 256 nothing."""

    @property
    def numbers(self) -> int:
        """Return 1: whether the image is solarised."""
        return 1

    def draw(self, numbers: list[float]) -> bool:
        """Return whether the image is solarised."""
        return numbers[0] < self.probability

    def apply(self, pixels: np.ndarray, parameters: bool) -> np.ndarray:
        """Return the solarised image, or `pixels`."""
        if not parameters:
            return pixels
        values = np.arange(256, dtype=np.uint8)
        return cv2.LUT(pixels, np.where(values < self.threshold, values, 255 - values))
