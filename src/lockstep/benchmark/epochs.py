"""Read the log of a run by epochs. Other programs report their runs in this way."""

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
    """What a run logged in one epoch."""

    number: int
    """The epoch's number, from 0."""
    intervals: tuple[Entry, ...]
    """Training entries in order; at least one."""
    evaluations: dict[str, Entry]
    """Entries of the evaluation at the end of the epoch, by weights ("trained", "ema"); empty without an evaluation."""

    @property
    def timed(self) -> tuple[Entry, ...]:
        """The intervals whose speed counts: all except those of profiled steps."""
        return tuple(entry for entry in self.intervals if "traced" not in entry)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.intervals[-1]["lr"])

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the epoch's images, from the means of the intervals; NaN if one has none."""
        found = [math.nan if entry[name] is None else entry[name] * entry["images"] for entry in self.intervals]
        return sum(found) / images_of(self.intervals)


@dataclass(frozen=True)
class LoggedRun:
    """What a run's folder says about the run."""

    recipe: Recipe
    environment: dict[str, Any]
    epochs: tuple[Epoch, ...]
    """The epochs that were started."""
    seconds: float
    """Time from the start of each process to its last entry, added up over all processes."""
    ended_at: float
    """Time of the last entry, in seconds since 1970."""


def images_of(entries: Iterable[Entry]) -> int:
    """Return the number of images in some training intervals."""
    return sum(entry["images"] for entry in entries)


def read_run(folder: Path) -> LoggedRun:
    """Read a run's folder. Raises `DataError` if it holds no run, a corrupt run, or a run that has trained nothing yet."""
    try:
        recipe = load_recipe(folder)
        environment = _environment(folder / "environment.json")
        ended_at = (folder / "log.jsonl").stat().st_mtime
    except OSError as error:
        raise DataError(f"{folder} holds no run that has started ({error.strerror}: {error.filename})") from None
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
        raise DataError(f"{path} is not a run's record of its environment; restore the file")
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
    """Return the time of all processes in seconds. Every process logs its start and counts from there."""
    ends = [before for before, after in pairwise(entries) if after["kind"] == "start"]
    return float(sum(entry["elapsed_sec"] for entry in [*ends, *entries[-1:]]))
