"""The synthetic loader: one batch of noise for each size, held on the device, to measure everything
except the input."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.recipes.order import BatchPlan


class SyntheticLoader(AbstractContextManager["SyntheticLoader"]):
    """Turns plans into batches with their labels and mixing, and with images of noise; a
    context manager."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._images = np.zeros((0, 0, 0, 3), np.uint8)

    def __exit__(self, *error: object) -> None:
        pass

    def batches(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Yield a batch for every plan."""
        for plan in plans:
            shape = (len(plan.samples), plan.size, plan.size, 3)
            if self._images.shape != shape:
                self._images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
            labels = self._index.labels(plan.samples)
            yield Batch(self._images, labels, **plan.batch_columns(), is_held=True)
