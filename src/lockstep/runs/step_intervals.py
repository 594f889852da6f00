"""The intervals that a run is divided into: steps that need no action of the host in between."""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.recipes import Execution


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
