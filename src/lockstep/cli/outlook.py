"""What a person sees of the rest of a run: the best evaluation so far, where early stopping would
end the run, and how long a step takes."""

from dataclasses import dataclass, field
from statistics import median_low
from typing import Self, cast

from lockstep.recipes.best_evaluation import (
    Selection,
    describe_best,
    format_value,
    is_better,
)
from lockstep.system.event_log import EvaluateEvent, StartEvent, TrainEvent

_LEAST_INTERVALS = 3
_STOPPED = 5.0
"""An interval whose steps take more than this many times as long as usual counts as a usual one:
its process was probably stopped."""


@dataclass
class Outlook:
    """The best evaluation of a run, and how long early stopping waits for a better one."""

    selection: Selection
    patience: int
    """The run's `early_stopping_epochs`; 0 without early stopping."""
    per_epoch: int
    """Steps of an epoch."""
    total: int
    """Steps of the whole run."""
    best: EvaluateEvent | None

    @classmethod
    def read(cls, event: StartEvent) -> Self | None:
        """Return the outlook at the start of a process; None if the event does not have it."""
        if "selection" not in event or "steps_per_epoch" not in event:
            return None
        return cls(
            selection=cast(Selection, event["selection"]),
            patience=event.get("early_stopping_epochs", 0),
            per_epoch=event["steps_per_epoch"],
            total=event["total"],
            best=event.get("best"),
        )

    def describe(self, event: EvaluateEvent) -> str:
        """Return what follows from an evaluation, for the end of its line."""
        if is_better(event, self.best, self.selection):
            self.best = event
        if self.best is None:
            return ""
        if self.best is event:
            text = ", the best so far"
        else:
            text = f"; the best is {describe_best(self.best, self.selection, short=True)}"
        last = self.best["step"] // self.per_epoch + self.patience
        if not self.patience or last * self.per_epoch >= self.total or event["step"] >= self.total:
            return text
        if event["step"] >= last * self.per_epoch:
            return text
        return f"{text}; ends after epoch {last} unless it improves"

    def name_best(self) -> str:
        """Return the best value as the progress bar shows it; "" if there is none."""
        return f"best {format_value(self.best, self.selection)}" if self.best else ""


@dataclass
class StepPace:
    """How long a step takes, from the last epoch in this process: with evaluation and saving."""

    per_epoch: int
    """Steps of an epoch; 0 if unknown."""
    step: int
    """The last step so far."""
    second: float
    """When it was done, in seconds since the process began."""
    intervals: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, seconds of training, and seconds of everything else."""
    is_new: bool = True
    """Whether the interval waited for compilers and caches."""

    def add(self, event: TrainEvent) -> None:
        """Add the interval of an event."""
        steps = event["step"] - self.step
        seconds = event.get("elapsed_sec", 0.0) - self.second
        if steps <= 0:
            return
        if self.intervals and self.is_new:
            self.intervals.clear()
            self.is_new = False
        training = min(event.get("images", 0) / event["images_per_sec"], seconds)
        self.intervals.append((steps, training, seconds - training))
        self.step += steps
        self.second += seconds
        while len(self.intervals) > _LEAST_INTERVALS:
            later = sum(interval[0] for interval in self.intervals[1:])
            if not self.per_epoch or later < self.per_epoch:
                break
            self.intervals.pop(0)

    def estimate(self) -> float | None:
        """Return the seconds of a step; None before the first interval."""
        if not self.intervals:
            return None
        usual = median_low(training / steps for steps, training, _ in self.intervals)
        total = 0.0
        for steps, training, others in self.intervals:
            was_stopped = training > _STOPPED * usual * steps
            total += others + (usual * steps if was_stopped else training)
        return total / sum(interval[0] for interval in self.intervals)
