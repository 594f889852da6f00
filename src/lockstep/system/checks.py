"""Reading JSON that anybody may have written: parsing without surprises, and checks of values.

A figure that is not finite is `null`, or one of the words NaN and Infinity that Python's writer leaves.
"""

import json
import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
_MOST = 2**53
"""Whole numbers up to here are exact in every reader of JSON."""


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is none, also for what is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_text(value: Any) -> bool:
    """Tell whether a value is a text."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Tell whether a value is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= _MOST


def is_number(value: Any) -> bool:
    """Tell whether a value is a number; true and false are none."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def is_figure(value: Any) -> bool:
    """Tell whether a value is a number or the null in place of one that is not finite."""
    return value is None or is_number(value)


def is_rate(value: Any) -> bool:
    """Tell whether a value is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def is_percent(value: Any) -> bool:
    """Tell whether a value is a number from 0 to 100."""
    return is_number(value) and 0 <= value <= 100


def is_list_of(check: Check) -> Check:
    """Return a check for lists whose items pass a check."""
    return lambda value: isinstance(value, list) and all(map(check, value))
