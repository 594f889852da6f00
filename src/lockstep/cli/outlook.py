"""What a person sees after each evaluation of a run: the best one so far, and where early stopping
would end the run."""

from dataclasses import dataclass
from typing import Self, cast

from lockstep.recipes.best_evaluation import (
    Selection,
    describe_best,
    format_value,
    is_better,
)
from lockstep.system.event_log import EvaluateEvent, StartEvent


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
