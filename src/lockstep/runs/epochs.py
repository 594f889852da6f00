"""Read the log of a run by epochs. Other programs report their runs in this way."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lockstep.recipes import Recipe
from lockstep.recipes.order import steps_per_epoch
from lockstep.runs.environment import Environment, read_environment
from lockstep.runs.reading import read_run
from lockstep.system.errors import CheckpointError
from lockstep.system.event_log import EvaluateEvent, LogEvent, TrainEvent
from lockstep.system.strict_json import is_count


@dataclass(frozen=True)
class Epoch:
    """What a run logged in one epoch."""

    number: int
    """The epoch's number, from 0."""
    intervals: tuple[TrainEvent, ...]
    """Training entries in order; at least one."""
    evaluations: dict[str, EvaluateEvent]
    """Entries of the evaluation at the end of the epoch, by weights ("trained", "ema"); empty
    without an evaluation."""

    @property
    def timed_intervals(self) -> tuple[TrainEvent, ...]:
        """The intervals whose speed counts: all except those of profiled steps."""
        return tuple(entry for entry in self.intervals if "traced" not in entry)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.intervals[-1]["lr"])

    def mean(self, name: Literal["loss", "top1_percent", "top5_percent"]) -> float:
        """Return the mean of a figure over the epoch's images, from the means of the intervals; NaN
        if one has none."""
        total = 0.0
        for entry in self.intervals:
            value = entry[name]
            total += math.nan if value is None else value * entry["images"]
        return total / count_images(self.intervals)


@dataclass(frozen=True)
class LoggedRun:
    """What a run's folder says about the run."""

    recipe: Recipe
    environment: Environment
    steps_per_epoch: int
    epochs: tuple[Epoch, ...]
    """The epochs that were started."""
    seconds: float
    """Time from the start of each process to its last entry, added up over all processes."""
    ended_at: float
    """Time of the last entry, in seconds since 1970."""


def count_images(entries: Iterable[TrainEvent]) -> int:
    """Return the number of images in some training intervals."""
    return sum(entry["images"] for entry in entries)


def read_epochs(folder: Path) -> LoggedRun:
    """Read a run's folder. Raises `CheckpointError` if it holds no run, a corrupt run, or one that
    has trained nothing."""
    run = read_run(folder)
    environment = read_environment(folder)  # refuses a damaged one, which a report leaves out
    images = environment.get("train", {}).get("images")
    ranks = environment.get("ranks")
    if not run.log or not environment:
        raise CheckpointError(f"{folder}: nothing was trained yet")
    if images is None or not is_count(images) or not is_count(ranks):
        raise CheckpointError(
            f"{folder / 'environment.json'} lacks the number of training images or of ranks;"
            " restore the file"
        )
    for entry in run.log:
        missing = {"elapsed_sec", *(["lr"] if entry["kind"] == "train" else [])} - entry.keys()
        if missing:
            raise CheckpointError(
                f"{folder / 'log.jsonl'}: the entry of step {entry['step']} has no {min(missing)}"
            )
    per_epoch = steps_per_epoch(run.recipe, images)
    epochs = group_by_epoch(run.log, per_epoch)
    if not epochs:
        raise CheckpointError(f"{folder}: nothing was trained yet")
    ended_at = (folder / "log.jsonl").stat().st_mtime
    return LoggedRun(
        run.recipe, environment, per_epoch, epochs, sum_process_seconds(run.log), ended_at
    )


def group_by_epoch(entries: Iterable[LogEvent], per_epoch: int) -> tuple[Epoch, ...]:
    """Return the epochs in which something was trained. `per_epoch` is the number of steps of an
    epoch."""
    # No interval lies in two epochs, and evaluations are at the ends of epochs.
    intervals: dict[int, list[TrainEvent]] = {}
    evaluations: dict[int, dict[str, EvaluateEvent]] = {}
    for entry in entries:
        if entry["kind"] == "train":
            intervals.setdefault(entry["first_step"] // per_epoch, []).append(entry)
        if entry["kind"] == "evaluate":
            evaluations.setdefault(entry["step"] // per_epoch - 1, {})[entry["weights"]] = entry
    return tuple(
        Epoch(number, tuple(events), evaluations.get(number, {}))
        for number, events in sorted(intervals.items())
    )


def sum_process_seconds(entries: Sequence[LogEvent]) -> float:
    """Return the time of all processes of a log in seconds. Every process logs its start and counts
    from there."""
    ends = [before for before, after in pairwise(entries) if after["kind"] == "start"]
    return float(sum(entry["elapsed_sec"] for entry in [*ends, *entries[-1:]]))
