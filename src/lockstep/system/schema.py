"""Types for values that strangers may have written, which pydantic checks."""

from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, WrapValidator

from lockstep.system.strict_json import MOST

Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(gt=0, le=MOST)]
Percent = Annotated[float, Field(ge=0, le=100)]
Figure = Annotated[
    float, WrapValidator(lambda value, check: None if value is None else check(value))
]
"""A number, or null, which stands for a number that is not finite."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def matches(value: Any, schema: Any) -> bool:
    """Return whether a value of a JSON file has exactly a type: neither true nor "1" is a number.
    Fields that a TypedDict does not name are ignored."""
    try:
        _make_adapter(schema).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@cache
def _make_adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
