"""Greyscale: colours are removed, in some images."""

import cv2
import numpy as np

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.kinds import Fraction
from lockstep.recipes.pixel_operators import make_grey


class Greyscale(Augmentation):
    """Replace colours by their greys, with Pillow's bits (torchvision's `RandomGrayscale`)."""

    probability: Fraction = 0.1
    """Probability that an image becomes grey."""

    @property
    def numbers(self) -> int:
        """Return 1: whether the image becomes grey."""
        return 1

    def draw(self, numbers: list[float]) -> bool:
        """Return whether the image becomes grey."""
        return numbers[0] < self.probability

    def apply(self, pixels: np.ndarray, parameters: bool) -> np.ndarray:
        """Return the image, or its greys."""
        return remove_colours(pixels) if parameters else pixels


def remove_colours(pixels: np.ndarray) -> np.ndarray:
    """Return the greys of an image in three equal channels: uint8 [height, width, 3]."""
    return cv2.cvtColor(make_grey(pixels), cv2.COLOR_GRAY2RGB)
