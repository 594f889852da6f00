"""The handle of steps whose results another thread fetches."""

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

Rows = tuple[np.ndarray, float]
"""A row for every step, and the time when the rows were there."""


@dataclass(frozen=True)
class FutureHandle:
    """Steps that were enqueued, and where on the host their sums will be."""

    first: int
    steps: int
    result: "Future[Rows]"
    """float64 [steps, 5]: loss sum, top-1, top-5 and images of all ranks, and the loss scale after
    the last step."""

    @property
    def ready(self) -> bool:
        """Whether the steps are done, so that `fetch` does not wait."""
        return self.result.done()
