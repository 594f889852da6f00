"""TrivialAugmentWide (arXiv:2103.10158), as torchvision does it."""

from typing import Annotated

from pydantic import Field

from lockstep.recipes.operations import LARGEST_WIDE, Operation, Operations, number_of_torchvision


class TrivialAugmentWide(Operations):
    """Apply one of 14 operations, drawn for each image with its magnitude (torchvision's
    `TrivialAugmentWide`)."""

    magnitudes: Annotated[int, Field(ge=2, le=10_000)] = 31
    """Number of magnitudes to draw from, torchvision's `num_magnitude_bins`."""

    @property
    def numbers(self) -> int:
        """Return 4: which operator, its magnitude, its sign, its interpolation."""
        return 4

    def draw(self, numbers: list[float]) -> tuple[Operation, ...]:
        """Return the operation of an image."""
        which, magnitude, sign, interpolation = numbers
        operator = list(LARGEST_WIDE)[int(which * len(LARGEST_WIDE))]
        number = number_of_torchvision(
            operator,
            LARGEST_WIDE[operator],
            int(magnitude * self.magnitudes),
            self.magnitudes - 1,
            negative=sign < 0.5,
        )
        return (Operation(operator, number, self.choose_interpolation(interpolation)),)
