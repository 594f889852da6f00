"""The host loader: threads that read, decode, crop, resize and augment images exactly as a plan
says, some batches ahead."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np

from lockstep.data import Batch
from lockstep.data.decoding.augment import Square, augment, cutting, decode_into
from lockstep.data.decoding.orientation import UPRIGHT
from lockstep.data.index import Index
from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.order import BatchPlan
from lockstep.system.machine import share_of_cores

AHEAD_BYTES = 2**28
"""Fetched ahead of the batch that a loader begins with."""
NEAR_BYTES = 2**13
"""Images with a gap of at most this many bytes between them are fetched together: more than the
headers between two images of a tar."""
WINDOW_GAP_BYTES = 2**20
"""The same for windowed order on one rank, which reads all of what lies between soon."""


class HostLoader(AbstractContextManager["HostLoader"]):
    """Turns plans into batches; a context manager. `how` are fields of `Square`.

    It holds at most `ahead` batches that are being decoded, and the one that it yielded last.
    """

    def __init__(
        self,
        index: Index,
        *,
        exif_orientation: bool = False,
        augmentations: Sequence[Augmentation] = (),
        threads: int = 0,
        ahead: int = 2,
        most_gap: int = NEAR_BYTES,
        **how: Any,
    ) -> None:
        assert ahead >= 1
        self._most_gap = most_gap
        self._index = index
        self._ahead = ahead
        self._how = how
        self._turns = exif_orientation
        self._augmentations = augmentations
        self._threads = threads or share_of_cores()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="lockstep-loader")

    def __exit__(self, *error: object) -> None:
        self._index.stop_prefetch()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def batches(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Yield the batch of every plan, in order, decoding ahead.

        Raises `DataError` naming the file that cannot be read.
        """
        plans = iter(plans)
        if self._index.is_stored:
            plans = fetch_ahead(self._index, plans, self._most_gap)
        started = deque(self._start(plan) for plan in islice(plans, self._ahead))
        try:
            while started:
                batch, work = started.popleft()
                for task in work:
                    task.result()
                plan = next(plans, None)
                if plan is not None:
                    started.append(self._start(plan))
                yield batch
        finally:
            for _, work in started:
                for task in work:
                    task.cancel()

    def _start(self, plan: BatchPlan) -> tuple[Batch, list[Future[None]]]:
        images = np.empty((len(plan.samples), plan.size, plan.size, 3), np.uint8)
        padded = plan.samples < 0
        images[padded] = 0
        to_load = np.flatnonzero(~padded).tolist()
        # One task for each image wastes the threads' time; too few tasks leave threads idle at the
        # end of a batch.
        count = max(len(to_load) // (4 * self._threads), 1)
        tasks = [to_load[first : first + count] for first in range(0, len(to_load), count)]
        work = [self._pool.submit(self._load, plan, some, images) for some in tasks]
        labels = self._index.labels(plan.samples)
        return Batch(images, labels, **plan.batch_columns()), work

    def _load(self, plan: BatchPlan, some: list[int], images: np.ndarray) -> None:
        for i in some:
            sample = int(plan.samples[i])
            orientation = int(self._index.orientations[sample]) if self._turns else UPRIGHT
            data = self._index.read(sample)
            try:
                square = Square(**self._how | cutting(plan, i), orientation=orientation)
                size = self._index.rows[["height", "width"]][sample].item()
                decode_into(data, size, square, images[i])
            except ValueError as error:
                raise self._index.explain_change(sample, str(error)) from None
            if self._augmentations and plan.augmentations is not None:
                augment(self._augmentations, plan.augmentations[i], images[i])


def fetch_ahead(index: Index, plans: Iterable[BatchPlan], most_gap: int) -> Iterator[BatchPlan]:
    """Yield plans; before, begin to fetch the images of this plan and of the next ones.

    The plans come in groups, whose images are fetched together. The first group is one plan, so
    that the first batch comes early; each group is twice as long as the one before, up to half of
    `AHEAD_BYTES`. A group begins to be fetched when the one before it is yielded.
    """
    plans = iter(plans)
    groups: deque[list[BatchPlan]] = deque()
    most = 1
    while True:
        while len(groups) < 2:
            group, most = _take_group(index, plans, most)
            if not group:
                break
            samples = np.concatenate([plan.samples for plan in group])
            index.prefetch(np.unique(samples[samples >= 0]), most_gap)
            groups.append(group)
        if not groups:
            return
        yield from groups.popleft()


def _take_group(index: Index, plans: Iterator[BatchPlan], most: int) -> tuple[list[BatchPlan], int]:
    """Return the next plans, at most `most` and at most half of `AHEAD_BYTES`, and how many plans
    the next group may have."""
    group: list[BatchPlan] = []
    size = 0
    while len(group) < most and size < AHEAD_BYTES // 2:
        plan = next(plans, None)
        if plan is None:
            break
        group.append(plan)
        size += int(index.rows["length"][plan.samples[plan.samples >= 0]].sum())
    return group, 2 * len(group)
