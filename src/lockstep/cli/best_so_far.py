"""A run's outlook: the best evaluation so far, where early stopping would end the run, and how long
a step takes."""

from dataclasses import dataclass, field
from statistics import median_low
from typing import Self

from lockstep.models.metrics import find_metric
from lockstep.recipes.best_evaluation import Selection, describe_best, is_better
from lockstep.system.event_log import EvaluateEvent, StartEvent, TrainEvent

_LEAST_INTERVALS = 3
_STOPPED = 5.0
"""If an interval's steps take more than this many times as long as usual, the usual time counts:
the process was probably suspended."""


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
        """Return the outlook at the start of a process; None if the event lacks its fields."""
        if "selection" not in event or "steps_per_epoch" not in event:
            return None
        return cls(
            selection=event["selection"],
            patience=event.get("early_stopping_epochs", 0),
            per_epoch=event["steps_per_epoch"],
            total=event["total"],
            best=event.get("best"),
        )

    def add(self, event: EvaluateEvent) -> None:
        """Add an evaluation, which may be the best one."""
        if is_better(event, self.best, self.selection):
            self.best = event

    def describe(self, event: EvaluateEvent, *, names_best: bool = True) -> str:
        """Return the end of an added evaluation's line: with `names_best`, an earlier one that is
        better; and where early stopping would end the run, if this step is not the best."""
        if self.best is None:
            return ""
        text = ""
        if self.best is event:
            text = ", best so far"
        elif names_best:
            text = f"; the best is {describe_best(self.best, self.selection, short=True)}"
        last = self.best["step"] // self.per_epoch + self.patience
        if not self.patience or last * self.per_epoch >= self.total or event["step"] >= self.total:
            return text
        if event["step"] == self.best["step"] or event["step"] >= last * self.per_epoch:
            return text
        return f"{text}; stops after epoch {last} unless it improves"

    def name_best(self) -> str:
        """Return the best value as the progress bar shows it; "" if there is none."""
        metric = find_metric(self.selection)
        return f"best {metric.describe(self.best, short=True)}" if self.best else ""


@dataclass
class StepPace:
    """How long a step takes, including evaluation and saving, in this process's last epoch."""

    per_epoch: int
    """Steps of an epoch; 0 if unknown."""
    step: int
    second: float
    """The last step so far, and when it was done."""
    intervals: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, seconds of training, and seconds of everything else."""

    def add(self, event: TrainEvent) -> float | None:
        """Add the interval of an event, and return the seconds per step; None without new steps."""
        steps = event["step"] - self.step
        seconds = event.get("elapsed_sec", 0.0) - self.second
        if steps <= 0:
            return None
        self.step += steps
        self.second += seconds
        training = min(event.get("images", 0) / event["images_per_sec"], seconds)
        interval = (steps, training, seconds - training)
        if not self.intervals:  # the first one also compiles and fills caches
            self.intervals.append((0, 0.0, 0.0))
            return seconds / steps
        recent = [interval]
        for other in reversed(self.intervals[1:]):
            done = sum(counted[0] for counted in recent)
            if len(recent) >= _LEAST_INTERVALS and 0 < self.per_epoch <= done:
                break
            recent.insert(0, other)
        self.intervals[1:] = recent
        usual = median_low(training / steps for steps, training, _ in recent)
        total = 0.0
        for steps, training, others in recent:
            was_stopped = training > _STOPPED * usual * steps
            total += others + (usual * steps if was_stopped else training)
        return total / sum(counted[0] for counted in recent)
