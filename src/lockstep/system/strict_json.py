"""Write JSON that any parser reads. JSON has no NaN and infinity, but Python's `json` writes words for them."""

import json
import math
from typing import Any

NOT_FINITE = "not_finite"
"""This key names the original values of numbers that JSON cannot hold."""


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return plain values as JSON. Letters of any language are written as they are.

    A number that is not finite becomes null, and the additional key `not_finite` names its value; for a list, that of the
    first such number.

    >>> to_json({"step": 3, "loss": float("inf")})
    '{"step": 3, "loss": null, "not_finite": {"loss": "inf"}}'
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        words = {name: word for name, held in value.items() if (word := _word(held)) is not None}
        plain = {name: _plain(held) for name, held in value.items()}
        return plain | {NOT_FINITE: words} if words else plain
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if _word(value) is not None else value


def _word(value: Any) -> str | None:
    """Return a number as a word if it is not finite, or the first such number of a list. Dictionaries name their own."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        return next((word for each in value if (word := _word(each)) is not None), None)
    return None
