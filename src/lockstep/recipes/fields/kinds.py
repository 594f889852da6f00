"""The kinds of values that fields have."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Strength = Annotated[float, Field(ge=0, le=1000)]
"""How much something changes an image: of order 1, or 10 for a magnitude. Far larger values would
overflow pixel numbers."""
_Finite = Annotated[float, Field(allow_inf_nan=False)]
Colour = tuple[_Finite, _Finite, _Finite]
Deviation = tuple[Positive, Positive, Positive]


def _check_range(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("expected a rising range, such as [0.1, 2.0]")
    return value


_Size = Annotated[float, Field(ge=0.001, le=1000)]
Range = Annotated[tuple[_Size, _Size], AfterValidator(_check_range)]
"""Smallest and largest value."""
Prefixes = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""Prefixes of the names of tensors (`lockstep.models.sections`). A single one needs no list."""
