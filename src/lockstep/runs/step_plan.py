"""The plan of a run's steps: its intervals, which need no action of the host in between, and where
a command or the run ends before the last step of the schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.models.metrics import find_metric
from lockstep.recipes import Execution
from lockstep.recipes.best_evaluation import describe_best, find_best
from lockstep.runs.context import RunContext
from lockstep.system.event_log import LogEvent

MOST_PROBE_IMAGES = 10_000
"""With more training images, a linear probe is fitted on about this many, so that features and
solver fit into memory (about 0.5 GB for ResNet-50)."""


@dataclass(frozen=True)
class IntervalPlan:
    """The consecutive steps first to stop - 1, and what happens after them."""

    first: int
    stop: int
    saves: bool
    evaluates: bool
    traced: bool = False


def plan_intervals(
    first: int, total: int, per_epoch: int, execution: Execution, end: int | None = None
) -> Iterator[IntervalPlan]:
    """Yield the intervals of a run of `total` steps from step `first` on, up to step `end`
    (default: all). Their borders do not depend on `first`. The last one is saved.

    >>> [plan.stop for plan in plan_intervals(3, 20, 8, Execution(log_every_steps=5))]
    [5, 8, 10, 15, 16, 20]
    >>> plans = plan_intervals(3, 20, 8, Execution(log_every_steps=5), end=9)
    >>> [(plan.stop, plan.saves) for plan in plans]
    [(5, False), (8, True), (9, True)]
    """
    end = total if end is None else end
    traced = execution.traced_steps
    while first < end:
        epoch = first // per_epoch + 1
        borders = [epoch * per_epoch, end]
        borders += [border for border in (traced.start, traced.stop) if border > first]
        if first not in traced:
            borders.append(_next_multiple(first, execution.log_every_steps))
        if execution.save_every_steps:
            borders.append(_next_multiple(first, execution.save_every_steps))
        stop = min(borders)
        epoch_ends = stop == epoch * per_epoch
        save_is_due = execution.save_every_steps > 0 and stop % execution.save_every_steps == 0
        evaluation_is_due = epoch % execution.evaluate_every_epochs == 0 or stop == total
        yield IntervalPlan(
            first,
            stop,
            saves=epoch_ends or save_is_due or stop == end,
            evaluates=epoch_ends and evaluation_is_due and not execution.train_only,
            traced=first in traced,
        )
        first = stop


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


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


def find_early_stop(run: RunContext, step: int) -> str | None:
    """Return why early stopping ends the run at a step before its last one, or None. All ranks get
    the same answer."""
    reason = explain_early_stop(run, run.recorder.evaluations, step)
    if not run.world.any(run.leads and reason is not None):
        return None
    return reason or "early stopping"  # only rank 0 has a log


def explain_early_stop(run: RunContext, log: Sequence[LogEvent], step: int) -> str | None:
    """Return the reason that a log gives for early stopping at a step before the last one, as a
    clause, or None.

    It is decided after each evaluation: the run ends if the best one by the recipe's `selection` is
    at least `early_stopping_epochs` ago.
    """
    recipe = run.recipe
    if step == run.total_steps:
        return None
    if step == 0 and leaves_only_probe(run):
        from lockstep.runs.starting_weights import starts_from_probe

        if starts_from_probe(run.out):
            return (
                "the linear probe is already the best fit: the features are frozen and images"
                " are not augmented"
            )
    evaluations = [entry for entry in log if entry["kind"] == "evaluate" and entry["step"] <= step]
    best = find_best(evaluations, recipe.selection)
    if not recipe.early_stopping_epochs or best is None or evaluations[-1]["step"] != step:
        return None
    since = (step - best["step"]) // run.steps_per_epoch
    if since < recipe.early_stopping_epochs:
        return None
    title = find_metric(recipe.selection).title
    return (
        f"{since} epoch{'s have' if since > 1 else ' has'} not improved the {title};"
        f" the best is {describe_best(best, recipe.selection, short=True)}"
    )


def leaves_only_probe(run: RunContext) -> bool:
    """Return whether a run trains the classifier alone, for the loss and on what a linear probe is
    fitted: cross-entropy, all images with equal weights, the same features in every epoch."""
    recipe = run.recipe
    trains_classifier = recipe.frozen == ("backbone",) and recipe.sparsity == "none"
    is_exact = not recipe.dropout and not recipe.stochastic_depth and recipe.quantisation == "none"
    is_augmented = recipe.varies_images or recipe.mixes_images
    is_weighted = recipe.class_weights != "none" or recipe.sampling != "plain"
    if recipe.loss != "cross_entropy" or is_augmented or is_weighted:
        return False
    if not (trains_classifier and is_exact):
        return False
    return len(run.sets.training) <= MOST_PROBE_IMAGES


def is_evaluation_due(run: RunContext, step: int) -> bool:
    """Return whether a run is evaluated at a step."""
    if step == 0:
        if run.execution.train_only or not (run.out / "start.json").exists():
            return False
        from lockstep.runs.starting_weights import starts_as_classifier

        return starts_as_classifier(run.out)
    intervals = plan_intervals(step - 1, run.total_steps, run.steps_per_epoch, run.execution)
    interval = next(intervals, None)
    return interval is not None and interval.stop == step and interval.evaluates
