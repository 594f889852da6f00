"""The synthetic loader: one batch of noise, made once and held on the device, to measure everything
except the input."""

from collections.abc import Iterable, Iterator
from types import TracebackType

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.recipes.order import BatchPlan


class SyntheticLoader:
    """Turns plans into batches with their labels and MixUp, and with images of noise; a context
    manager."""

    def __init__(self, index: Index, *, size: int) -> None:
        self._index = index
        self._size = size
        self._images = np.zeros((0, size, size, 3), np.uint8)

    def __enter__(self) -> "SyntheticLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def batches(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Yield a batch for every plan."""
        for plan in plans:
            count = len(plan.samples)
            if len(self._images) != count:
                noise = np.random.default_rng(0).integers(
                    0, 256, (count, self._size, self._size, 3), dtype=np.uint8
                )
                self._images = noise
            yield Batch(
                self._images,
                self._index.labels(plan.samples),
                plan.coefficients,
                plan.partners,
                is_held=True,
            )
