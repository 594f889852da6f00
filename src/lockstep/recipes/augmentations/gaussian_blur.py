"""Gaussian blur, in some images, with a random width."""

from typing import Literal

import cv2
import numpy as np
from PIL import Image, ImageFilter

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.kinds import Fraction, Range

TAPS = 23
"""Pixels that torchvision's filter weighs in each direction, in timm's training script."""


class GaussianBlur(Augmentation):
    """Blur images with a Gaussian of random width, by Pillow's or torchvision's filter."""

    probability: Fraction = 0.5
    """Probability that an image is blurred."""
    sigma: Range = (0.1, 2.0)
    """Range of the standard deviation in pixels. It is drawn uniformly."""
    dialect: Literal["pillow", "torchvision"] = "pillow"
    """Whose filter it is. "pillow": three box filters in each direction, as SimCLR, DeiT III and
    timm's policies use it (`ImageFilter.GaussianBlur`). "torchvision": weights of a Gaussian for 23
    pixels in each direction, as timm's `--gaussian-blur-prob` uses it (`GaussianBlur(23)`)."""

    @property
    def numbers(self) -> int:
        """Return 2: whether the image is blurred, and how widely."""
        return 2

    def draw(self, numbers: list[float]) -> float | None:
        """Return the standard deviation, or None if the image stays."""
        if numbers[0] >= self.probability:
            return None
        smallest, largest = self.sigma
        return smallest + (largest - smallest) * numbers[1]

    def apply(self, pixels: np.ndarray, parameters: float | None) -> np.ndarray:
        """Return the image, blurred with a standard deviation unless it is None."""
        if parameters is None:
            return pixels
        if self.dialect == "pillow":
            return blur_by_boxes(pixels, parameters)
        return _blur_by_weights(pixels, parameters)


def _blur_by_weights(pixels: np.ndarray, sigma: float) -> np.ndarray:
    """Return an image blurred by torchvision's filter with this standard deviation in pixels."""
    weights = cv2.getGaussianKernel(TAPS, sigma)
    # 8 bits of a pixel and twice 22 bits of a weight: all sums are exact in float64, and so the
    # pixels are the same on every processor.
    weights = np.rint(weights * 2**22) / 2**22
    blurred = cv2.sepFilter2D(
        pixels, cv2.CV_64F, weights, weights, borderType=cv2.BORDER_REFLECT_101
    )
    return np.rint(blurred).astype(np.uint8)


def blur_by_boxes(pixels: np.ndarray, sigma: float) -> np.ndarray:
    """Return an image blurred by Pillow's three box filters, which together have this standard
    deviation in pixels."""
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(sigma)))
