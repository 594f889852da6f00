"""Where a command and a run end before the last step of the schedule. All functions are pure."""

from collections.abc import Iterable

from lockstep.models.metrics import find_metric
from lockstep.recipes import Execution
from lockstep.recipes.best_evaluation import Selection, describe_best, find_best
from lockstep.system.event_log import LogEvent


def find_last_step(first: int, total: int, per_epoch: int, execution: Execution) -> int:
    """Return the step after which a command ends that resumes a run of `total` steps at step
    `first`.

    Epochs count from the last complete one, so that a command always ends at the end of an epoch,
    also if the one before it was killed within an epoch. If epochs and steps are set, the smaller
    number decides.

    >>> two_epochs = Execution(stop_after_epochs=2)
    >>> find_last_step(0, 70, 7, two_epochs), find_last_step(16, 70, 7, two_epochs)
    (14, 28)
    >>> find_last_step(16, 70, 7, Execution(stop_after_steps=3))
    19
    >>> find_last_step(16, 70, 7, Execution())
    70
    """
    ends = [total]
    if execution.stop_after_epochs:
        ends.append((first // per_epoch + execution.stop_after_epochs) * per_epoch)
    if execution.stop_after_steps:
        ends.append(first + execution.stop_after_steps)
    return min(ends)


def explain_early_stop(
    log: Iterable[LogEvent], step: int, per_epoch: int, epochs: int, selection: Selection
) -> str | None:
    """Return why early stopping ends a run at a step, as a clause; None if it does not, or if
    `epochs` is 0.

    It is decided from the log alone, after each evaluation: the run ends if the best one by
    `selection` is at least `epochs` epochs of `per_epoch` steps ago.
    """
    evaluations = [entry for entry in log if entry["kind"] == "evaluate" and entry["step"] <= step]
    best = find_best(evaluations, selection)
    if not epochs or best is None or evaluations[-1]["step"] != step:
        return None
    since = (step - best["step"]) // per_epoch
    if since < epochs:
        return None
    title = find_metric(selection).title
    return (
        f"{since} epoch{'s have' if since > 1 else ' has'} not improved the {title};"
        f" the best is {describe_best(best, selection, short=True)}"
    )
