"""The cache of objects on the disk: what it keeps, and what it counts."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.stores.cached_object import BLOCK_BYTES
from lockstep.data.stores.eviction import NEVER, Reads, await_part, choose_blocks
from lockstep.data.stores.objects import StoredObject
from lockstep.data.stores.transfer import Part, Transfer
from lockstep.system.errors import DataError
from tests.soak import EXAMPLES, SOAK

ITEMS = [StoredObject("a.tar", 40 * BLOCK_BYTES + 100, "1", 0), StoredObject("b.tar", 9000, "2", 0)]
CONTENTS = {
    item.name: np.random.default_rng(place).bytes(item.size) for place, item in enumerate(ITEMS)
}


class MemoryStore:
    """A store without a network."""

    def read_range(self, item: StoredObject, begin: int, end: int) -> memoryview:
        return memoryview(CONTENTS[item.name][begin:end])


class SilentStore(MemoryStore):
    """A store that does not answer until `ended` is set, and then gives an error."""

    def __init__(self) -> None:
        self.ended = Event()
        self.requests = 0

    def read_range(self, item: StoredObject, begin: int, end: int) -> memoryview:
        self.requests += 1
        self.ended.wait(60)
        raise DataError(f"{item.name} cannot be read")


class KnownPool(ThreadPoolExecutor):
    """Threads whose work can be waited for."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.work: list[Future[Any]] = []

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        task = super().submit(*call, **named)
        self.work.append(task)
        return task

    def wait(self) -> None:
        while self.work:
            self.work.pop().result()


def _open(folder: Path, limit_blocks: int) -> tuple[Transfer, KnownPool]:
    store: Any = MemoryStore()
    transfer = Transfer(store, ITEMS, folder, limit_blocks * BLOCK_BYTES)
    pool = KnownPool(4)
    transfer._pool = pool
    return transfer, pool


def test_what_waits_for_a_request_that_fails_is_not_asked_for(tmp_path: Path) -> None:
    transfer, pool = _open(tmp_path, 100)
    store = SilentStore()
    transfer._store = store
    parts = [Part(ITEMS[0], place * BLOCK_BYTES, (place + 1) * BLOCK_BYTES) for place in range(40)]
    transfer.prefetch(parts, -1)
    store.ended.set()
    with pytest.raises(DataError, match=r"a\.tar cannot be read"):
        transfer.read(parts[-1])
    assert all(isinstance(task.exception(), DataError) for task in pool.work)
    assert store.requests <= 4 + 1  # those of the threads, and of the read
    transfer._store = MemoryStore()
    assert transfer.read(parts[0]) == CONTENTS["a.tar"][:BLOCK_BYTES]


def _measure(folder: Path) -> int:
    """Return what the blocks take on the disk."""
    size = 0
    for path in folder.iterdir():
        if path.suffix == ".blocks":
            continue
        own = 0
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            at = 0
            with suppress(OSError):  # there is no data after the last hole
                while at < end:
                    begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                    at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                    own += -(-(at - begin) // BLOCK_BYTES) * BLOCK_BYTES
            # A file in many parts takes another block on ext4, for the list of them.
            assert own <= os.fstat(file.fileno()).st_blocks * 512 <= own + BLOCK_BYTES
        size += own
    return size


def _count_fewest_fetches(reads: list[int], capacity: int) -> int:
    """Return how many fetches any cache needs, by trying all that it could keep."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for block in reads:
        later: dict[frozenset[int], int] = {}
        for kept, cost in costs.items():
            cost += block not in kept
            others = kept - {block}
            for choice in combinations(others, min(capacity - 1, len(others))):
                key = frozenset((block, *choice))
                later[key] = min(cost, later.get(key, cost))
        costs = later
    return min(costs.values())


@pytest.mark.parametrize("seed", range(8 if SOAK else 2))
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_known_plan_needs_the_fewest_fetches(tmp_path: Path, seed: int, capacity: int) -> None:
    reads = np.random.default_rng(seed).integers(0, 7, 40).tolist()
    transfer, _ = _open(tmp_path, capacity)
    ahead = deque(reads)

    def list_reads() -> Iterator[Reads]:
        blocks = np.arange(7)
        steps = [ahead.index(block) if block in ahead else NEVER for block in blocks.tolist()]
        begins = blocks * BLOCK_BYTES + 10
        yield Reads("a.tar", begins, begins + 1000, np.array(steps, np.int32))

    transfer.list_reads = list_reads
    for block in reads:
        ahead.popleft()
        begin = block * BLOCK_BYTES + 10
        assert transfer.read(Part(ITEMS[0], begin, begin + 5)) == CONTENTS["a.tar"][begin:][:5]
    assert transfer.fetched_bytes == _count_fewest_fetches(reads, capacity) * BLOCK_BYTES


PARTS = st.tuples(st.sampled_from(ITEMS), st.floats(0, 1), st.integers(1, 5 * BLOCK_BYTES)).map(
    lambda drawn: Part(
        drawn[0],
        int(drawn[1] * (drawn[0].size - 1)),
        min(int(drawn[1] * (drawn[0].size - 1)) + drawn[2], drawn[0].size),
    )
)


@EXAMPLES
@given(
    st.lists(st.lists(PARTS, min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 9)
)
def test_the_bytes_on_the_disk_are_counted_and_limited(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Part]], limit_blocks: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    transfer, pool = _open(folder, limit_blocks)
    for group in groups:
        transfer.prefetch(group, 2 * BLOCK_BYTES)
        for part in group:
            assert transfer.read(part) == CONTENTS[part.item.name][part.begin : part.end]
        pool.wait()
        assert transfer.kept_bytes == _measure(folder)
        assert transfer.kept_bytes <= transfer.limit_bytes
    assert _open(folder, limit_blocks)[0].kept_bytes == transfer.kept_bytes


def test_what_is_to_be_read_stays(tmp_path: Path) -> None:
    transfer, pool = _open(tmp_path, 1)
    parts = [Part(ITEMS[0], place * BLOCK_BYTES, place * BLOCK_BYTES + 9) for place in (1, 5, 30)]
    transfer.prefetch(parts, 0)
    for part in parts:
        transfer.read(part)
    pool.wait()
    assert transfer.fetched_bytes == 3 * BLOCK_BYTES
    assert transfer.kept_bytes == BLOCK_BYTES


def test_a_block_stays_as_long_as_any_of_its_images_is_needed() -> None:
    kept = {name: np.array([0, 1, 2, 5], np.int32) for name in ("old", "new")}
    begins = np.array([0, 5000, 21_000])
    images = Reads("old", begins, begins + 4000, np.array([7, 3, NEVER], np.int32))
    order = []
    for count in range(1, 9):
        chosen = choose_blocks(kept, [images, await_part("new", 4000, 4200)], count)
        blocks = {(name, block) for name, some in chosen.items() for block in some.tolist()}
        order += sorted(blocks - set(order))
    # What nobody needs, of the object that was not used for the longest time; then what is needed
    # last. The image of step 3 has bytes in blocks 1 and 2; what is awaited stays.
    never = [("old", 5), ("new", 2), ("new", 5)]
    assert order == [*never, ("old", 0), ("old", 1), ("old", 2)]
