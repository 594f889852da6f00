"""The log of a run by epochs, which is how other programs report theirs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.recipes import Recipe, load_recipe
from lockstep.recipes.order import steps_per_epoch
from lockstep.runs.shapes import is_environment
from lockstep.system.checks import is_count, parsed
from lockstep.system.errors import DataError
from lockstep.system.event_log import read_log

Entry = dict[str, Any]
"""A line of `log.jsonl`."""


@dataclass(frozen=True)
class Epoch:
    """What a run logged of one epoch."""

    number: int
    """From 0."""
    intervals: tuple[Entry, ...]
    """Entries of training, in order; at least one."""
    evaluations: dict[str, Entry]
    """Entries of the evaluation at its end, by weights ("trained", "ema"); empty without one."""

    @property
    def timed(self) -> tuple[Entry, ...]:
        """The intervals whose speed counts: all but those of steps under a profiler."""
        return tuple(entry for entry in self.intervals if "traced" not in entry)

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.intervals[-1]["lr"])

    def mean(self, name: str) -> float:
        """Return the mean over the epoch's images of a figure that every interval has the mean of; NaN if one has none."""
        found = [math.nan if entry[name] is None else entry[name] * entry["images"] for entry in self.intervals]
        return sum(found) / images_of(self.intervals)


@dataclass(frozen=True)
class LoggedRun:
    """What a run's folder tells of it."""

    recipe: Recipe
    environment: dict[str, Any]
    epochs: tuple[Epoch, ...]
    """Those that were begun."""
    seconds: float
    """From the start of each process to its last entry, added up."""
    ended_at: float
    """When the last entry was written: seconds since 1970."""


def images_of(entries: Iterable[Entry]) -> int:
    """Return the images of some intervals of training."""
    return sum(entry["images"] for entry in entries)


def read_run(folder: Path) -> LoggedRun:
    """Read a run's folder. Raises `DataError` if it holds no run, a damaged one, or one that has trained nothing yet."""
    try:
        recipe = load_recipe(folder)
        environment = _environment(folder / "environment.json")
        ended_at = (folder / "log.jsonl").stat().st_mtime
    except OSError as error:
        raise DataError(f"{folder} holds no run that has begun ({error.strerror}: {error.filename})") from None
    entries = read_log(folder / "log.jsonl", whole=True)
    for entry in entries:
        missing = {"elapsed_sec", *(["lr"] if entry["kind"] == "train" else [])} - entry.keys()
        if missing:
            raise DataError(f"{folder / 'log.jsonl'}: the entry of step {entry['step']} has no {min(missing)}")
    epochs = _epochs(entries, steps_per_epoch(recipe, environment["train"]["images"]))
    if not epochs:
        raise DataError(f"{folder}: nothing was trained yet")
    return LoggedRun(recipe, environment, epochs, _seconds(entries), ended_at)


def _environment(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parsed(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); restore the file") from None
    if not is_environment(found) or not is_count(found.get("train", {}).get("images")) or not is_count(found.get("ranks")):
        raise DataError(f"{path} is not what a run notes of its environment; restore the file")
    return found


def _epochs(entries: list[Entry], per_epoch: int) -> tuple[Epoch, ...]:
    # No interval lies in two epochs, and evaluations are at the ends of epochs.
    intervals: dict[int, list[Entry]] = {}
    evaluations: dict[int, dict[str, Entry]] = {}
    for entry in entries:
        if entry["kind"] == "train":
            intervals.setdefault(entry["first_step"] // per_epoch, []).append(entry)
        if entry["kind"] == "evaluate":
            evaluations.setdefault(entry["step"] // per_epoch - 1, {})[entry["weights"]] = entry
    return tuple(Epoch(number, tuple(each), evaluations.get(number, {})) for number, each in sorted(intervals.items()))


def _seconds(entries: list[Entry]) -> float:
    """Return the time of all processes; every one logs its start and counts from there."""
    ends = [before for before, after in pairwise(entries) if after["kind"] == "start"]
    return float(sum(entry["elapsed_sec"] for entry in [*ends, *entries[-1:]]))
