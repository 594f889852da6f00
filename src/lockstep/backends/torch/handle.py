"""Steps that were enqueued, and when they were done."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TorchHandle:
    """Steps that were enqueued, and where on the host their sums will be."""

    first: int
    sums: Tensor
    """float64 [steps, 4], valid once `done`: loss sum, top-1, top-5 and images of all ranks."""
    loss_scale: Tensor
    done: torch.cuda.Event | None
    """An event on a GPU, with its time; None on a CPU, where enqueued work is already done."""
    enqueued_at: float

    @property
    def ready(self) -> bool:
        """Whether the steps are done, so that `fetch` does not wait."""
        return self.done is None or self.done.query()

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.sums)


class EndTimes:
    """Waits for events of a GPU, and records when they were over, for later queries.

    `train` can return when most of its steps are done, so that the host asks late.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None

    def wait(self, done: torch.cuda.Event) -> float:
        """Wait for an event; return when it was over, by `time.perf_counter`. Events must be given
        in their order."""
        is_late = done.query()
        done.synchronize()
        over_at = time.perf_counter()
        if is_late and self._last is not None:
            before, at = self._last
            over_at = min(over_at, at + before.elapsed_time(done) / 1000)
        self._last = done, over_at
        return over_at
