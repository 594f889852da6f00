"""3-Augment: one of greyscale, solarise and blur, then colour jitter."""

from functools import cached_property

import numpy as np

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.augmentations.colour_jitter import NO_GEOMETRY, Changes, ColourJitter
from lockstep.recipes.augmentations.gaussian_blur import blur_by_boxes
from lockstep.recipes.augmentations.greyscale import remove_colours
from lockstep.recipes.fields.kinds import Strength
from lockstep.recipes.pixel_operators import solarise

_CHOICES = ("greyscale", "solarise", "blur")
_SIGMAS = (0.1, 2.0)


class ThreeAugment(Augmentation):
    """Remove colours, solarise or blur, then jitter colours (DeiT III's 3-Augment).

    Source: arXiv:2204.07118, `augment.py` of its code, and timm's policy "3a". The threshold is
    128, and the blur is Pillow's, with a standard deviation of 0.1 to 2 pixels.
    """

    jitter: Strength = 0.3
    """Brightness, contrast and saturation of the colour jitter; 0 leaves it out."""

    @property
    def numbers(self) -> int:
        """Return 8: which of three, the width of a blur, and those of the colour jitter."""
        return 2 + self._colour_jitter.numbers

    @cached_property
    def _colour_jitter(self) -> ColourJitter:
        return ColourJitter(
            brightness=self.jitter, contrast=self.jitter, saturation=self.jitter, hue=0.0
        )

    def draw(self, numbers: list[float]) -> tuple[str, float, Changes]:
        """Return which of three changes, the standard deviation of a blur, and the changes of
        colours."""
        choice, sigma, *others = numbers
        smallest, largest = _SIGMAS
        return (
            _CHOICES[int(choice * len(_CHOICES))],
            smallest + (largest - smallest) * sigma,
            self._colour_jitter.draw(others),
        )

    def apply(self, pixels: np.ndarray, parameters: tuple[str, float, Changes]) -> np.ndarray:
        """Return the changed image."""
        choice, sigma, changes = parameters
        if choice == "greyscale":
            pixels = remove_colours(pixels)
        elif choice == "solarise":
            pixels = solarise(pixels, 128, NO_GEOMETRY)
        else:
            pixels = blur_by_boxes(pixels, sigma)
        return self._colour_jitter.apply(pixels, changes)
