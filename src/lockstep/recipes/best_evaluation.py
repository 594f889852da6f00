"""Which evaluation of a run is the best one, by the field `selection` of its recipe."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from lockstep.models.metrics import find_metric
from lockstep.system.event_log import EvaluateEvent, LogEvent
from lockstep.system.strict_json import is_number

Selection = Annotated[str, AfterValidator(lambda name: find_metric(name).name)]
"""The name of a metric."""


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
    better, nor is one that is missing from the log of an older version."""
    metric = find_metric(selection)
    value: Any = event.get(metric.key)
    best: Any = than and than.get(metric.key)
    if not is_number(value) or not is_number(best):
        return is_number(value)
    return bool(value > best if metric.more_is_better else value < best)


def describe_best(best: Mapping[str, Any], selection: Selection, *, short: bool = False) -> str:
    """Return the best evaluation as text; with `short`, without the name of the value and its 95 %
    interval.

    >>> best = {"top1_percent": 93.3333, "images": 150, "step": 84, "weights": "ema"}
    >>> describe_best(best, "top1")
    'top-1 93.33 % (88.2 to 96.3) at step 84 (moving average)'
    >>> describe_best(best, "top1", short=True)
    '93.33 % at step 84 (moving average)'
    """
    metric = find_metric(selection)
    title = "" if short else f"{metric.title} "
    return f"{title}{metric.describe(best, short=short)} {describe_place(best)}"


def describe_place(evaluation: Mapping[str, Any]) -> str:
    """Return the step of an evaluation and its kind of weights."""
    average = " (moving average)" if evaluation.get("weights") == "ema" else ""
    return f"at step {evaluation['step']}{average}"
