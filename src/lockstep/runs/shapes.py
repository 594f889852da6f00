"""What the JSON files of a run must hold to be read: plain checks of values that any hand may have written.

A figure that is not finite is `null`, or one of the words NaN and Infinity that Python's writer leaves.
"""

import json
import math
from collections.abc import Callable, Mapping
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


_FIELDS: dict[str, Check] = {
    "step": is_count,
    "first_step": is_count,
    "total": is_count,
    "images": lambda value: is_count(value) and value > 0,
    "images_per_sec": is_rate,
    "data_wait_share": is_number,
    "loss": is_figure,
    "losses": is_list_of(is_figure),
    "loss_scale": is_figure,
    "top1_percent": is_percent,
    "top5_percent": is_percent,
    "lr": is_figure,
    "elapsed_sec": is_number,
    "weights": is_text,
    "message": is_text,
}
_SCORES = ("images", "loss", "top1_percent", "top5_percent")
_NEEDED = {"train": ("first_step", "images", "images_per_sec"), "evaluate": ("weights",)}
_WHOLE = {
    "train": (*_SCORES, "images_per_sec", "first_step", "losses", "loss_scale", "data_wait_share"),
    "evaluate": (*_SCORES, "images_per_sec", "weights"),
    "diverged": ("message",),
}


def problem_of_entry(entry: Any, *, whole: bool) -> str | None:
    """Return what is wrong with an entry of a log, None if nothing is. `whole`: it must have all that training writes."""
    if not isinstance(entry, dict):
        return "it is not an object"
    if not is_text(entry.get("kind")):
        return "it has no kind"
    needed = (_WHOLE if whole else _NEEDED).get(entry["kind"], ())
    problem = _problem(entry, ("step", *needed))
    if problem is None and entry["kind"] == "train" and not entry["first_step"] < entry["step"]:
        return "its first_step is not below its step"
    return problem


def _problem(entry: Mapping[str, Any], needed: tuple[str, ...]) -> str | None:
    for name, check in _FIELDS.items():
        if name in entry and not check(entry[name]):
            return f"its {name} is {repr(entry[name])[:60]}"
        if name not in entry and name in needed:
            return f"it has no {name}"
    return None


def is_report(value: Any) -> bool:
    """Tell whether a value is the report of a finished run, as far as it is read again."""
    if not isinstance(value, dict):
        return False
    final, best, classes, counts = (value.get(name) for name in ("final", "best", "classes", "per_class"))
    if not (isinstance(final, dict) and isinstance(counts, dict) and is_list_of(is_text)(classes) and "trained" in final):
        return False
    evaluations = [(each, ("step", *_SCORES)) for each in final.values()] + [(best, ("step", "top1_percent"))]
    return (
        all(isinstance(each, dict) and _problem(each, needed) is None for each, needed in evaluations)
        and all(isinstance(each, dict) and _are_counts(each, len(classes or ())) for each in counts.values())
        and is_figure(value.get("images_per_sec"))
        and all(is_number(value.get(name)) for name in ("steps", "train_sec", "quarantined"))
    )


def _are_counts(columns: Mapping[str, Any], classes: int) -> bool:
    found = [columns.get(name) for name in ("images", "top1", "top5")]
    return all(isinstance(column, list) and len(column) == classes and all(map(is_count, column)) for column in found)


def is_environment(value: Any) -> bool:
    """Tell whether a value is what a run notes of where it runs, as far as it is read again."""
    if not isinstance(value, dict):
        return False
    parts = (value.get(name, {}) for name in ("execution", "train", "val"))
    return all(isinstance(part, dict) for part in parts) and isinstance(value.get("data"), str | None)
