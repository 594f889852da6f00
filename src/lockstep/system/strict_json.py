"""Write JSON that any parser reads, parse untrusted JSON safely, and check its values.

JSON has no NaN and infinity, but Python's `json` writes words for them. A figure that is not finite
is `null` here; the checks also accept Python's words.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

NOT_FINITE = "not_finite"
"""This key names the original values of numbers that JSON cannot hold."""
_SURROGATE = re.compile("[\ud800-\udfff]")
Check = Callable[[Any], bool]
MOST = 2**53
"""Every JSON reader reads whole numbers up to this one exactly."""


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return plain values as JSON. Letters of any language are written as they are.

    Bytes of file names that are not UTF-8, which Python holds as surrogates, become JSON escapes.
    A number that is not finite becomes null, and the additional key `not_finite` names its value;
    for a list, that of the first such number.

    >>> to_json({"step": 3, "loss": float("inf")})
    '{"step": 3, "loss": null, "not_finite": {"loss": "inf"}}'
    """
    text = json.dumps(_replace_numbers(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _replace_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {}
        words = {}
        for name, item in value.items():
            plain[name] = _replace_numbers(item)
            word = _find_word(item)
            if word is not None:
                words[name] = word
        return plain | {NOT_FINITE: words} if words else plain
    if isinstance(value, list | tuple):
        return list(map(_replace_numbers, value))
    return value if _find_word(value) is None else None


def _find_word(value: Any) -> str | None:
    """Return a number as a word if it is not finite, or the first such number of a list.
    Dictionaries name their own."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        return next(filter(None, map(_find_word, value)), None)
    return None


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is not JSON, is nested too deep to
    be read, or has an object with a duplicate key: other readers may use the other value."""
    try:
        return json.loads(text, object_pairs_hook=_make_object)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(key, _)] = Counter(map(itemgetter(0), pairs)).most_common(1)
        raise ValueError(f"an object has the key {key!r:.80} twice")
    return values


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return type(value) is int and 0 <= value <= MOST


def is_positive(value: Any) -> bool:
    """Return whether a value is a whole number above 0."""
    return is_count(value) and value > 0


def is_number(value: Any) -> bool:
    """Return whether a value is a number. Booleans are not numbers."""
    return type(value) is float or (type(value) is int and abs(value) <= MOST)


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
