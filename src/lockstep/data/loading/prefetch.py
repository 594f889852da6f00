"""What a loader will read from an object store, fetched before it is needed, in the order of the
plans."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from lockstep.data.index import Index
from lockstep.recipes.order import BatchPlan

AHEAD_BYTES = 2**28
"""Fetched ahead of the batch that a loader begins with."""
NEAR_BYTES = 2**13
"""Images with a gap of at most this many bytes between them are fetched together: more than the
headers between two images of a tar."""
WINDOW_GAP_BYTES = 2**20
"""The same for windowed order on one rank, which reads all of what lies between soon."""


def fetch_ahead(index: Index, plans: Iterable[BatchPlan], most_gap: int) -> Iterator[BatchPlan]:
    """Yield plans; before, begin to fetch the images of this plan and of the next ones.

    The plans come in groups, whose images are fetched together. The first group is one plan, so
    that the first batch comes early; each group is twice as long as the one before, up to half of
    `AHEAD_BYTES`. A group begins to be fetched when the one before it is handed out.
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
