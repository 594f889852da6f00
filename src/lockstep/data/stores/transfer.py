"""Ranges of objects, fetched by some threads at a time, and kept within a limit of the disk."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from lockstep.data.stores.cached_object import BLOCK_BYTES, CachedObject
from lockstep.data.stores.eviction import Reads, await_part, choose_blocks
from lockstep.data.stores.objects import CONNECTIONS, RangeReader, StoredObject
from lockstep.system.errors import DataError

MOST_BYTES = 2**23
"""The maximum length of a request."""


class Part(NamedTuple):
    """A range of bytes of an object."""

    item: StoredObject
    begin: int
    end: int


class Transfer:
    """What one process fetches and keeps of a store's objects. Threads may call everything at the
    same time."""

    def __init__(
        self, store: RangeReader, items: Iterable[StoredObject], folder: Path, limit_bytes: int
    ) -> None:
        """Keep the parts in a folder that no other process uses, with those of an earlier run that
        are there.

        The blocks in the folder take at most `limit_bytes`, and besides what was to be fetched by
        `prefetch` and is not read yet, and `CONNECTIONS` answers of `MOST_BYTES` that were fetched
        while others were given up.
        """
        self.limit_bytes = limit_bytes
        self.fetched_bytes = 0
        """The sum of all answers."""
        self.kept_bytes = 0
        """What the blocks take on the disk."""
        self.list_reads: Callable[[], Iterable[Reads]] = tuple
        """Lists what is read next, as far as it is known, when the cache has to choose."""
        self._store = store
        self._folder = folder
        self._lock = Lock()
        self._shrinking = Lock()
        self._cached: OrderedDict[str, CachedObject] = OrderedDict()
        """What was used last is at the end."""
        self._requested: dict[tuple[str, int], Future[None]] = {}
        """The blocks that are being fetched."""
        self._failure: DataError | None = None
        """The last error of a request."""
        self._awaited: set[Part] = set()
        """What is to be read and stays until then."""
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="lockstep-store")
        for item in items:
            if (folder / name_file(item)).exists():
                self._open(item)

    def prefetch(self, parts: Iterable[Part], most_gap: int) -> None:
        """Begin to fetch parts that are not here. Those of an object with a gap of at most
        `most_gap` bytes between them are fetched together."""
        parts = list(parts)
        with self._lock:
            self._awaited.update(parts)
        for part in join_parts(parts, most_gap):
            self._request(part)

    def read(self, part: Part) -> bytes:
        """Return the bytes of a part; wait for them if they are not here.

        Raises `DataError` if the object changed or cannot be read.
        """
        cached = self._open(part.item)
        with self._lock:
            self._awaited.add(part)
        while (data := self._take(cached, part)) is None:
            for request in self._request(part):
                with suppress(CancelledError):  # then it is requested again
                    request.result()
        with self._lock:
            self._awaited.discard(part)
        if self.kept_bytes > self.limit_bytes:
            self._pool.submit(self._shrink)
        return data

    def _take(self, cached: CachedObject, part: Part) -> bytes | None:
        with self._naming_disk():
            return cached.read(part.begin, part.end)

    def cancel(self) -> None:
        """Cancel fetches that have not begun. Their parts are fetched when they are read."""
        with self._lock:
            self._awaited.clear()
            for place, request in list(self._requested.items()):
                if request.cancel():
                    del self._requested[place]

    def _request(self, part: Part) -> set[Future[None]]:
        """Begin to fetch what is missing of a part and return what has to end before it is here."""
        name = part.item.name
        requests = set()
        cached = self._open(part.item)
        with self._lock:
            for begin, end in cached.find_missing(part.begin, part.end):
                blocks = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
                wanted = [block for block in blocks if (name, block) not in self._requested]
                for first, last in _group(wanted, MOST_BYTES // BLOCK_BYTES):
                    stop = min(last * BLOCK_BYTES, part.item.size)
                    missing = Part(part.item, first * BLOCK_BYTES, stop)
                    request = self._pool.submit(self._fetch, missing, self._failure)
                    for block in range(first, last):
                        self._requested[name, block] = request
                requests |= {self._requested[name, block] for block in blocks}
        return requests

    def _fetch(self, part: Part, last_failure: DataError | None) -> None:
        """Fetch and keep a part. `last_failure` is the last one when it was requested: what waits
        while another request fails fails with it, or a store that does not answer would be asked
        for each part in turn."""
        try:
            if self._failure is not last_failure:
                raise DataError(str(self._failure))
            data, added = self._keep(part)
        finally:
            with self._lock:
                for block in range(part.begin // BLOCK_BYTES, -(-part.end // BLOCK_BYTES)):
                    del self._requested[part.item.name, block]
        with self._lock:
            self.fetched_bytes += len(data)
            self.kept_bytes += added
        self._shrink()

    def _keep(self, part: Part) -> tuple[memoryview, int]:
        """Fetch a part and write it to the disk. Return it, and by how many bytes there are more on
        the disk."""
        try:
            data = self._store.read_range(*part)
            with self._naming_disk():
                return data, self._open(part.item).write(part.begin, data)
        except DataError as error:
            self._failure = error
            raise

    @contextmanager
    def _naming_disk(self) -> Iterator[None]:
        """Turn an error of the local disk into one that is not taken for that of an image."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot write fetched data to {self._folder}: {error.strerror or error}. Free"
                " space there, or set XDG_CACHE_HOME to a folder on another disk"
            ) from None

    def _open(self, item: StoredObject) -> CachedObject:
        with self._lock, self._naming_disk():
            if item.name not in self._cached:
                cached = CachedObject(self._folder / name_file(item), item.size)
                self.kept_bytes += len(cached.list_blocks()) * BLOCK_BYTES
                self._cached[item.name] = cached
            self._cached.move_to_end(item.name)
            return self._cached[item.name]

    def _shrink(self) -> None:
        """Give up what is read last until the rest is within the limit: a sixteenth more than has
        to be, since a choice takes as long for one block as for many."""
        with self._shrinking:
            with self._lock:
                excess = self.kept_bytes - self.limit_bytes
                cached = dict(self._cached)
                awaited = list(self._awaited)
            if excess <= 0:
                return
            count = -(-excess // BLOCK_BYTES) + self.limit_bytes // BLOCK_BYTES // 16
            kept = {name: own.list_blocks() for name, own in cached.items()}
            reads = chain(
                self.list_reads(),
                (await_part(part.item.name, part.begin, part.end) for part in awaited),
            )
            for name, blocks in choose_blocks(kept, reads, count).items():
                with self._naming_disk():
                    dropped = cached[name].drop(blocks)
                with self._lock:
                    self.kept_bytes -= dropped


def join_parts(parts: Iterable[Part], most_gap: int) -> list[Part]:
    """Return parts in which those of an object with small gaps between them are one.

    >>> item = StoredObject("a.tar", 9000, "", 0)
    >>> [part[1:] for part in join_parts([Part(item, 500, 700), Part(item, 0, 400)], 100)]
    [(0, 700)]
    """
    joined: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.item.name, part.begin)):
        last = joined[-1] if joined else None
        if last is not None and last.item == part.item and part.begin - last.end <= most_gap:
            joined[-1] = last._replace(end=max(last.end, part.end))
        else:
            joined.append(part)
    return joined


def _group(blocks: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return consecutive numbers as pairs of the first one and the one after the last."""
    groups: list[tuple[int, int]] = []
    for block in blocks:
        if groups and groups[-1][1] == block and block - groups[-1][0] < most:
            groups[-1] = (groups[-1][0], block + 1)
        else:
            groups.append((block, block + 1))
    return groups


def name_file(item: StoredObject) -> str:
    """Return the name of the file for the parts of an object: another one when it changes."""
    return hashlib.sha256(f"{item.name}\0{item.version}".encode()).hexdigest()[:32]
