"""Which evaluation of a run is the best one, by the field `selection` of its recipe."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lockstep.models.accuracy_interval import format_accuracy
from lockstep.models.metrics import format_loss
from lockstep.system.event_log import EvaluateEvent, LogEvent

Selection = Literal["top1", "balanced_accuracy", "macro_f1", "loss"]
NAMES: dict[Selection, str] = {
    "top1": "top-1",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "loss": "loss",
}
"""What the values are called where they are shown."""


def find_best(log: Iterable[LogEvent], selection: Selection) -> EvaluateEvent | None:
    """Return the evaluation with the best value in a log; None if there is none.

    All kinds of weights count, also the moving average. If several values are equal, the earliest
    evaluation is the best one.

    >>> log = [{"kind": "evaluate", "step": step, "loss": loss} for step, loss in ((8, 2), (16, 1))]
    >>> find_best(log, "loss")["step"]
    16
    """
    best: EvaluateEvent | None = None
    for event in log:
        if event["kind"] == "evaluate" and is_better(event, best, selection):
            best = event
    return best


def is_better(event: EvaluateEvent, than: EvaluateEvent | None, selection: Selection) -> bool:
    """Return whether an evaluation is better than another one, or than none. An equal value is not
    better."""
    score = _score(event, selection)
    if score is None or than is None:
        return score is not None
    best = _score(than, selection)
    return best is None or score > best


def _score(event: EvaluateEvent, selection: Selection) -> float | None:
    """Return a number that is greater if an evaluation is better; None if the log of an older
    version does not have it."""
    if selection == "loss":
        loss = event.get("loss")
        return None if loss is None else -loss
    percent = event.get(f"{selection}_percent")
    return float(percent) if isinstance(percent, float | int) else None


def describe_best(best: Mapping[str, Any], selection: Selection, *, short: bool = False) -> str:
    """Return the best evaluation as it is shown, if `short` without the name of the value and its
    95 % interval.

    >>> best = {"top1_percent": 93.3333, "images": 150, "step": 84, "weights": "ema"}
    >>> describe_best(best, "top1")
    'top-1 93.33 % (88.2 to 96.3) at step 84 (moving average)'
    >>> describe_best(best, "top1", short=True)
    '93.33 % at step 84 (moving average)'
    """
    average = " (moving average)" if best.get("weights") == "ema" else ""
    value = format_value(best, selection)
    if selection == "top1" and "images" in best and not short:
        value = format_accuracy(best["top1_percent"], best["images"])
    name = "" if short else f"{NAMES[selection]} "
    return f"{name}{value} at step {best['step']}{average}"


def format_value(event: Mapping[str, Any], selection: Selection) -> str:
    """Return the value that decides, as it is shown.

    >>> format_value({"top1_percent": 93.333}, "top1")
    '93.33 %'
    """
    if selection == "loss":
        return format_loss(event["loss"])
    return f"{event[f'{selection}_percent']:.2f} %"
