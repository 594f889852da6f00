"""What an augmentation is: a change of the pixels of training images, with its parameters, its draw
and its pixels in one class. Each has a file in `lockstep.recipes.augmentations`.
"""

from abc import abstractmethod
from typing import Any

import numpy as np

from lockstep.recipes.field_validation import Settings

BUILT_IN = "lockstep.recipes.augmentations"
"""The package of the augmentations that Lockstep has. Each module has one, of the module's name."""


class Augmentation(Settings):
    """A change of the pixels of training images, after crop, resize and flip.

    Its fields are its parameters. They have defaults and are documented, like the fields of a
    recipe. What is done to an image is a function of random numbers that depend on (seed, epoch,
    position) alone. So it is the same on every backend and for any number of ranks, and a run
    resumes exactly.
    """

    @property
    def name(self) -> str:
        """Its name in a recipe: that of its module, or `module:Class` if it is the user's own."""
        module, _, last = type(self).__module__.rpartition(".")
        return last if module == BUILT_IN else f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many random numbers it needs for an image."""

    @abstractmethod
    def draw(self, numbers: list[float]) -> Any:
        """Return what is done to an image, as data: what `apply` gets as `parameters`.

        `numbers` are `self.numbers` independent random numbers, uniform in [0, 1). It must not use
        other random numbers.
        """

    @abstractmethod
    def apply(self, pixels: np.ndarray, parameters: Any) -> np.ndarray:
        """Return the changed image: uint8 RGB [size, size, 3], as `pixels` is.

        It may change `pixels` itself and return it. Several threads call this at once.
        """

    def fields(self) -> dict[str, Any]:
        """Return its name and its fields as plain values, in order: an entry of a recipe."""
        return {"name": self.name} | super().fields()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Augmentation) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.name)
