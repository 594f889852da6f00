"""AugMix: an image is mixed with chains of operations on it (arXiv:1912.02781), as torchvision does
it."""

from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from lockstep.recipes.operations import (
    Interpolations,
    Operation,
    Operations,
    number_of_torchvision,
)

LARGEST = {
    "shear_x": 0.3,
    "shear_y": 0.3,
    "move_x_by_share": 1 / 3,
    "move_y_by_share": 1 / 3,
    "rotate": 30,
    "posterise": 4,
    "solarise": 1,
    "autocontrast": 0,
    "equalise": 0,
    "brightness": 0.9,
    "colour": 0.9,
    "contrast": 0.9,
    "sharpness": 0.9,
}
"""The operators of torchvision's AugMix, with the largest magnitude of each."""
_MAGNITUDES = 10
_LONGEST = 3


class Mixture(NamedTuple):
    """What an image is mixed from."""

    weights: tuple[float, ...]
    """Those of the image itself and of each chain; the sum is 1."""
    chains: tuple[tuple[Operation, ...], ...]


class AugMix(Operations):
    """Mix an image with chains of one to three operations on it, with random weights
    (torchvision's `AugMix` with `alpha` 1; the operators are Pillow's).

    The paper's loss for three versions of an image is not included.
    """

    interpolation: Interpolations = "bilinear"
    """Interpolation of changes of geometry. "random" is "bilinear" or "bicubic", drawn for each
    operation."""
    severity: Annotated[int, Field(ge=1, le=_MAGNITUDES)] = 3
    """Operations draw from this many of the lowest magnitudes, out of 10 from none to the
    largest."""
    width: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of chains."""
    depth: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of operations in a chain. 0: drawn for each chain, from 1 to 3."""

    @property
    def numbers(self) -> int:
        """Return one for each weight and the depth of each chain, and four for each operation."""
        return 2 * self.width + 4 * self.width * (self.depth or _LONGEST)

    def draw(self, numbers: list[float]) -> Mixture:
        """Return the weights and the chains of an image."""
        own, *cuts = numbers[: self.width]
        depths = numbers[self.width : 2 * self.width]
        rows = np.reshape(numbers[2 * self.width :], (self.width, -1, 4)).tolist()
        # The gaps between sorted uniform numbers have the Dirichlet distribution with alpha 1.
        shares = np.diff([0.0, *sorted(cuts), 1.0]) * (1 - own)
        chains = []
        for depth, row in zip(depths, rows, strict=True):
            length = self.depth or 1 + int(depth * _LONGEST)
            chains.append(tuple(self._draw_operation(four) for four in row[:length]))
        return Mixture((own, *shares.tolist()), tuple(chains))

    def _draw_operation(self, numbers: list[float]) -> Operation:
        which, magnitude, sign, interpolation = numbers
        operator = list(LARGEST)[int(which * len(LARGEST))]
        number = number_of_torchvision(
            operator,
            LARGEST[operator],
            int(magnitude * self.severity),
            _MAGNITUDES - 1,
            negative=sign < 0.5,
        )
        if operator == "posterise":
            number -= 4  # it begins with 4 bits, not with 8
        if operator == "solarise":
            number = 255 * number
        return Operation(operator, number, self.choose_interpolation(interpolation))

    def apply(self, pixels: np.ndarray, parameters: Any) -> np.ndarray:
        """Return the image as a `Mixture` says. Fractions are cut off, as by torchvision."""
        own, *shares = map(np.float32, parameters.weights)
        mixed: np.ndarray = own * pixels
        for share, chain in zip(shares, parameters.chains, strict=True):
            mixed += share * super().apply(pixels, chain)
        return mixed.astype(np.uint8)
