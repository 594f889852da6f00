"""Read untrusted JSON: safe parsing, and checks of values.

A figure that is not finite is `null`, or one of the words NaN and Infinity that Python's own writer produces.
"""

import json
import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
_MOST = 2**53
"""Every JSON reader reads whole numbers up to this one exactly."""


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is not JSON or nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return type(value) is int and 0 <= value <= _MOST


def is_number(value: Any) -> bool:
    """Return whether a value is a number. Booleans are not numbers."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def is_figure(value: Any) -> bool:
    """Return whether a value is a number, or null, which stands for a number that is not finite."""
    return value is None or is_number(value)


def is_rate(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def is_percent(value: Any) -> bool:
    """Return whether a value is a number from 0 to 100."""
    return is_number(value) and 0 <= value <= 100


def is_list_of(check: Check) -> Check:
    """Return a check for lists whose items all pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))
