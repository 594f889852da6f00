"""The base class of augmentations: changes to the pixels of training images, with parameters, draw
and pixel code in one class. Each has a file in `lockstep.recipes.augmentations`.
"""

from abc import abstractmethod
from typing import Any

import numpy as np

from lockstep.recipes.field_validation import Settings

BUILT_IN = "lockstep.recipes.augmentations"
"""The package of Lockstep's augmentations. Each module has one, named after the module."""


class Augmentation(Settings):
    """A change of the pixels of training images, after crop, resize and flip.

    Parameters are fields with defaults and docstrings. Random numbers depend on (seed, epoch,
    position) alone: an image changes alike on every backend and number of ranks, and on resuming.

    >>> import lockstep
    >>> recipe = lockstep.load_recipe("demo").replace(augmentations=["solarise"])
    >>> recipe.augmentations[0].draw([0.3])
    True
    """

    @property
    def name(self) -> str:
        """The name in a recipe: that of the module, or `module:Class` for your own."""
        module, _, last = type(self).__module__.rpartition(".")
        return last if module == BUILT_IN else f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    @abstractmethod
    def numbers(self) -> int:
        """The number of random numbers that an image needs."""

    @abstractmethod
    def draw(self, numbers: list[float]) -> Any:
        """Return what to do to an image, as data that `apply` gets as `parameters`.

        Args:
            numbers: `self.numbers` random numbers, uniform in [0, 1). Use no others.
        """

    @abstractmethod
    def apply(self, pixels: np.ndarray, parameters: Any) -> np.ndarray:
        """Return the changed image, uint8 RGB [size, size, 3]. Several threads call this at once.

        Args:
            pixels: The image; you may change it in place.
            parameters: What `draw` returned.
        """

    def fields(self) -> dict[str, Any]:
        """Return the name and the fields as plain values, in order: an entry of a recipe."""
        return {"name": self.name} | super().fields()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Augmentation) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.name)
