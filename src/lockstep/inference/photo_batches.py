"""Batches of whole photos, as exported programs take them that resize and crop."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.inference.images import read_photo
from lockstep.recipes import Recipe
from lockstep.system.machine import share_of_cores

_MOST_PIXELS = 2**24
"""Photos of a batch have at most this many pixels together, unless one has more: three bytes each.
"""


def group_photos(sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the places of photos that follow each other and have one size, at most `most`
    together, and `_MOST_PIXELS`.

    `sizes` are heights and widths: int64 [N, 2].

    >>> group_photos(np.array([[4, 3], [4, 3], [4, 3], [5, 3]]), 2)
    [array([0, 1]), array([2]), array([3])]
    """
    changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
    groups = []
    for run in np.split(np.arange(len(sizes)), changes):
        count = max(1, min(most, _MOST_PIXELS // int(sizes[run[0]].prod()))) if len(run) else 1
        groups += [run[start : start + count] for start in range(0, len(run), count)]
    return groups


def load_photos(
    index: Index, recipe: Recipe, groups: list[np.ndarray], threads: int = 0
) -> Iterator[Batch]:
    """Yield batches of whole photos, turned as the recipe says. Raises `DataError` that names the
    file.

    As many threads as there are cores decode ahead, unless `threads` is a number of them.
    """

    def read(sample: int) -> np.ndarray:
        try:
            return read_photo(index.read(sample), recipe)
        except ValueError as error:
            raise index.explain_change(sample, str(error)) from None

    threads = threads or share_of_cores()
    samples = iter(np.concatenate(groups).tolist() if groups else [])
    with ThreadPoolExecutor(threads, thread_name_prefix="lockstep-photos") as pool:
        started = deque(pool.submit(read, sample) for sample in islice(samples, 2 * threads))
        try:
            for group in groups:
                photos = []
                for _ in group:
                    photos.append(started.popleft().result())
                    started.extend(pool.submit(read, sample) for sample in islice(samples, 1))
                yield Batch(np.stack(photos), index.labels(group))
        finally:
            for task in started:
                task.cancel()
