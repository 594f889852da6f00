"""Checks of a run's report and environment files: do they have the fields that are read again?"""

from collections.abc import Mapping
from typing import Any

from lockstep.system.checks import is_count, is_figure, is_list_of, is_number, is_text
from lockstep.system.event_log import SCORES, problem_of_fields


def is_report(value: Any) -> bool:
    """Return whether a value is the report of a finished run. Only fields that are read again are checked."""
    if not isinstance(value, dict):
        return False
    final, best, classes, counts = (value.get(name) for name in ("final", "best", "classes", "per_class"))
    if not (isinstance(final, dict) and isinstance(counts, dict) and is_list_of(is_text)(classes) and "trained" in final):
        return False
    evaluations = [(each, ("step", *SCORES)) for each in final.values()] + [(best, ("step", "top1_percent"))]
    return (
        all(isinstance(each, dict) and problem_of_fields(each, needed) is None for each, needed in evaluations)
        and all(isinstance(each, dict) and _are_counts(each, len(classes or ())) for each in counts.values())
        and is_figure(value.get("images_per_sec"))
        and all(is_number(value.get(name)) for name in ("steps", "train_sec", "quarantined"))
    )


def _are_counts(columns: Mapping[str, Any], classes: int) -> bool:
    found = [columns.get(name) for name in ("images", "top1", "top5")]
    return all(isinstance(column, list) and len(column) == classes and all(map(is_count, column)) for column in found)


def is_environment(value: Any) -> bool:
    """Return whether a value is the environment of a run. Only fields that are read again are checked."""
    if not isinstance(value, dict):
        return False
    parts = (value.get(name, {}) for name in ("execution", "train", "val"))
    return all(isinstance(part, dict) for part in parts) and isinstance(value.get("data"), str | None)
