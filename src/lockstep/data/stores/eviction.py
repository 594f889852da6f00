"""Which blocks of objects a cache on the disk gives up: those that are read last."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from lockstep.data.stores.cached_object import BLOCK_BYTES
from lockstep.recipes.next_steps import NEVER

_AWAITED = -1


class Reads(NamedTuple):
    """Images of an object, and when each is read next."""

    name: str
    """Of the object."""
    begins: np.ndarray
    """int64 [images]: the first byte of each."""
    ends: np.ndarray
    """int64 [images]: the byte after the last."""
    steps: np.ndarray
    """int32 [images]: the step of a run; `NEVER` if it is not known."""


def await_part(name: str, begin: int, end: int) -> Reads:
    """Return bytes of an object that are not given up, since they are to be read at once."""
    return Reads(name, np.array([begin]), np.array([end]), np.array([_AWAITED], np.int32))


def choose_blocks(
    kept: Mapping[str, np.ndarray], reads: Iterable[Reads], count: int
) -> dict[str, np.ndarray]:
    """Return the blocks to give up, by the names of their objects: at most `count`.

    `kept` has the numbers of the blocks on the disk, int32 [blocks], in increasing order. The
    objects come in the order of their last use, the one that was not used for the longest time
    first. A block is needed when the first image with bytes in it is. Blocks that no image needs go
    first, those of the first objects before others; then those that are needed last, which costs
    the fewest reads (Belady, 1966). Of several `reads` of the same bytes, the last one counts.
    """
    steps = {}
    for age, (name, blocks) in enumerate(kept.items()):
        steps[name] = np.full(len(blocks), NEVER - age, np.int32)
    for images in reads:
        if images.name in kept:
            _note_steps(steps[images.name], kept[images.name], images)
    every = np.concatenate([np.zeros(0, np.int32), *steps.values()])
    last = np.argsort(-every, kind="stable")[:count]
    is_given_up = np.zeros(len(every), np.bool_)
    is_given_up[last] = every[last] != _AWAITED
    ends = np.cumsum([len(blocks) for blocks in kept.values()])
    parts = np.split(is_given_up, ends[:-1])
    return {name: kept[name][part] for name, part in zip(kept, parts, strict=True) if part.any()}


def _note_steps(steps: np.ndarray, blocks: np.ndarray, images: Reads) -> None:
    """Write the steps of images to those of the blocks in which they are."""
    known = np.flatnonzero(images.steps != NEVER)
    known = known[np.argsort(-images.steps[known], kind="stable")]  # the soonest is written last
    first = np.searchsorted(blocks, images.begins[known] // BLOCK_BYTES)
    counts = np.searchsorted(blocks, -(-images.ends[known] // BLOCK_BYTES)) - first
    starts = np.cumsum(counts) - counts
    places = np.repeat(first - starts, counts) + np.arange(counts.sum())
    steps[places] = np.repeat(images.steps[known], counts)
