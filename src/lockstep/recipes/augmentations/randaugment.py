"""RandAugment (arXiv:1909.13719), as torchvision and as timm do it."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.recipes.fields.kinds import Fraction, Strength
from lockstep.recipes.operations import (
    LARGEST,
    Fill,
    Interpolations,
    Operation,
    Operations,
    draw_normal,
    number_of_timm,
    number_of_torchvision,
)

_TIMM = {
    "magnitude": 10,
    "full_magnitude": 10,
    "probability": 0.5,
    "increasing": False,
    "interpolation": "random",
    "fill": (124, 116, 104),
}
"""Values of fields in timm's dialect where they are not set. The fill is ImageNet's mean."""
_TIMM_OPERATORS = (
    *("autocontrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise_add"),
    *("colour", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)
_NUMBERS = 5
"""Random numbers of an operation: which, whether, its magnitude, its sign, its interpolation."""


class RandAugment(Operations):
    """Apply some of 14 or 15 operations, drawn for each image, all with one magnitude.

    Fields that are not set have the defaults of the dialect.
    """

    dialect: Literal["torchvision", "timm"] = "torchvision"
    """Whose operators and numbers: "torchvision" is its `RandAugment`, "timm" its `rand-...`."""
    operations: Annotated[int, Field(ge=1, le=32)] = 2
    """Number of operations of an image. Each is any of the operators."""
    magnitude: Strength = 9.0
    """How much an operation changes. timm: 10 if it is not set."""
    full_magnitude: Annotated[float, Field(ge=1, le=10_000)] = 30.0
    """The magnitude at which an operation has its full strength. torchvision has whole magnitudes
    from 0 to this one, its `num_magnitude_bins` - 1. timm: 10."""
    magnitude_std: Strength | Literal["uniform"] = 0.0
    """timm's `mstd`: standard deviation of the magnitude, drawn for each operation and cut off at 0
    and `magnitude_max`. "uniform" draws it uniformly from 0 to `magnitude`."""
    magnitude_max: Strength = 10.0
    """timm's `mmax`: the largest magnitude."""
    probability: Fraction = 1.0
    """Probability of each operation. timm's `p`: 0.5 if it is not set."""
    increasing: bool = True
    """Whether a larger magnitude changes more, for every operator, as in torchvision. timm's `inc`:
    false if it is not set; then posterising and solarising change less, and colours are at their
    own values at half of the full magnitude."""
    interpolation: Interpolations = "nearest"
    """Interpolation of changes of geometry. "random" is "bilinear" or "bicubic", drawn for each
    operation: timm's default."""
    fill: Fill = (0, 0, 0)
    """Red, green and blue of pixels that come from outside the image. timm: 124, 116, 104."""

    @model_validator(mode="before")
    @classmethod
    def _follow_dialect(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return _TIMM | fields if fields.get("dialect") == "timm" else fields

    @model_validator(mode="after")
    def _check_dialect(self) -> Self:
        if self.dialect == "timm":
            return self
        if not self.magnitude.is_integer() or not self.full_magnitude.is_integer():
            raise ValueError("torchvision's magnitudes are whole numbers")
        if self.magnitude > self.full_magnitude:
            raise ValueError(
                f"magnitude is {self.magnitude:g}; expected at most full_magnitude,"
                f" {self.full_magnitude:g}"
            )
        if self.magnitude_std != 0 or self.magnitude_max != 10 or not self.increasing:
            raise ValueError(
                "magnitude_std, magnitude_max and increasing: false are timm's; add dialect: timm"
            )
        return self

    @property
    def numbers(self) -> int:
        """Return how many numbers all operations need."""
        return _NUMBERS * self.operations

    def draw(self, numbers: list[float]) -> tuple[Operation, ...]:
        """Return the operations of an image."""
        drawn = []
        for first in range(0, len(numbers), _NUMBERS):
            which, whether, magnitude, sign, interpolation = numbers[first : first + _NUMBERS]
            if whether >= self.probability:
                continue
            how = self.choose_interpolation(interpolation)
            if self.dialect == "timm":
                operator = _TIMM_OPERATORS[int(which * len(_TIMM_OPERATORS))]
                share = self._draw_magnitude(magnitude) / self.full_magnitude
                number = number_of_timm(
                    operator, share, negative=sign < 0.5, increasing=self.increasing
                )
            else:
                operator = list(LARGEST)[int(which * len(LARGEST))]
                number = number_of_torchvision(
                    operator,
                    LARGEST[operator],
                    int(self.magnitude),
                    int(self.full_magnitude),
                    negative=sign < 0.5,
                )
            drawn.append(Operation(operator, number, how))
        return tuple(drawn)

    def _draw_magnitude(self, number: float) -> float:
        magnitude = self.magnitude
        if self.magnitude_std == "uniform":
            magnitude *= number
        elif self.magnitude_std:
            magnitude = draw_normal(number, magnitude, self.magnitude_std)
        return max(0.0, min(magnitude, self.magnitude_max))
