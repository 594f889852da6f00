"""The intervals that a run is divided into: steps that need no action of the host in between."""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.recipes import Execution


@dataclass(frozen=True)
class Span:
    """The consecutive steps first to stop - 1, and what happens after them."""

    first: int
    stop: int
    saves: bool
    evaluates: bool
    traced: bool = False


def spans(
    first: int, total: int, per_epoch: int, execution: Execution, end: int | None = None
) -> Iterator[Span]:
    """Yield the intervals of a run of `total` steps from step `first` on, up to step `end`
    (default: all). Their borders do not depend on `first`. The last one is saved.

    >>> [span.stop for span in spans(3, 20, 8, Execution(log_every_steps=5))]
    [5, 8, 10, 15, 16, 20]
    >>> [(span.stop, span.saves) for span in spans(3, 20, 8, Execution(log_every_steps=5), end=9)]
    [(5, False), (8, True), (9, True)]
    """
    end = total if end is None else end
    while first < end:
        epoch = first // per_epoch + 1
        traced = execution.traced_steps
        borders = [
            epoch * per_epoch,
            end,
            *(border for border in (traced.start, traced.stop) if border > first),
        ]
        if first not in traced:
            borders.append(_next_multiple(first, execution.log_every_steps))
        if execution.save_every_steps:
            borders.append(_next_multiple(first, execution.save_every_steps))
        stop = min(borders)
        epoch_ends = stop == epoch * per_epoch
        asked = execution.save_every_steps > 0 and stop % execution.save_every_steps == 0
        evaluates = epoch_ends and (epoch % execution.evaluate_every_epochs == 0 or stop == total)
        evaluates = evaluates and not execution.train_only
        yield Span(
            first,
            stop,
            saves=epoch_ends or asked or stop == end,
            evaluates=evaluates,
            traced=first in traced,
        )
        first = stop


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every
