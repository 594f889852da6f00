"""Parts of an object on the disk: a file with holes where nothing was fetched, and a list of the
blocks that it has."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

BLOCK_BYTES = 4096
"""Fetched parts begin and end at multiples of this, as holes of a file do. An image of a photo has
some 100 KB."""
_KEEP_SIZE = 1
_PUNCH_HOLE = 2


class CachedObject:
    """What one process has of an object. Threads may call everything at the same time."""

    def __init__(self, path: Path, size: int) -> None:
        """Open the file, or make it. `size` is the object's length in bytes."""
        self.size = size
        self._lock = Lock()
        self._path = path
        self._flags = path.with_name(path.name + ".blocks")
        blocks = max(-(-size // BLOCK_BYTES), 1)
        flags = self._flags.read_bytes() if self._flags.exists() else b""
        if len(flags) != blocks:
            flags = bytes(blocks)
            self._flags.write_bytes(flags)
            path.unlink(missing_ok=True)
        self._present = np.frombuffer(flags, np.bool_).copy()

    @contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        """Open a file for one call: there may be more objects than a process may open."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def _mark(self, first: int, last: int, is_present: bool) -> None:
        self._present[first:last] = is_present
        with self._open(self._flags) as file:
            os.pwrite(file, self._present[first:last].tobytes(), first)

    def count_bytes(self) -> int:
        """Return how many bytes are on the disk."""
        return int(np.count_nonzero(self._present)) * BLOCK_BYTES

    def list_parts(self) -> list[tuple[int, int]]:
        """Return the ranges of bytes that are on the disk."""
        edges = np.flatnonzero(np.diff(self._present, prepend=False, append=False)) * BLOCK_BYTES
        return [(int(begin), int(min(end, self.size))) for begin, end in edges.reshape(-1, 2)]

    def find_missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes to fetch before bytes `begin` to `end` are whole."""
        with self._lock:
            return self._list_missing(begin, end)

    def _list_missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        first = begin // BLOCK_BYTES
        absent = ~self._present[first : -(-end // BLOCK_BYTES)]
        edges = np.flatnonzero(np.diff(absent, prepend=False, append=False)) + first
        return [
            (int(start) * BLOCK_BYTES, min(int(stop) * BLOCK_BYTES, self.size))
            for start, stop in edges.reshape(-1, 2)
        ]

    def write(self, begin: int, data: memoryview) -> None:
        """Keep fetched bytes: whole blocks, or up to the end of the object."""
        offset = begin
        with self._lock, self._open(self._path) as file:
            while data:
                written = os.pwrite(file, data, offset)
                offset += written
                data = data[written:]
            # The blocks count only when they are written.
            self._mark(begin // BLOCK_BYTES, -(-offset // BLOCK_BYTES), True)

    def read(self, begin: int, end: int) -> bytes | None:
        """Return bytes `begin` to `end`; None if some of them are missing."""
        with self._lock:  # nothing may be dropped between the question and the read
            if self._list_missing(begin, end):
                return None
            data = b""
            with self._open(self._path) as file:
                while len(data) < end - begin:
                    more = os.pread(file, end - begin - len(data), begin + len(data))
                    if not more:
                        raise OSError(f"{self._path} is shorter than what was written to it")
                    data += more
        return data

    def drop(self, begin: int, end: int) -> int:
        """Free the blocks that lie whole within bytes `begin` to `end`; return how many bytes that
        were."""
        first = -(-begin // BLOCK_BYTES)
        last = -(-end // BLOCK_BYTES) if end == self.size else end // BLOCK_BYTES
        if first >= last:
            return 0
        with self._lock:
            dropped = int(np.count_nonzero(self._present[first:last])) * BLOCK_BYTES
            self._mark(first, last, False)
            with self._open(self._path) as file:
                _punch_hole(file, first * BLOCK_BYTES, (last - first) * BLOCK_BYTES)
        return dropped


def _punch_hole(file: int, offset: int, length: int) -> None:
    """Give a part of a file back to the file system. Where it cannot do that, the part stays on the
    disk until it is overwritten."""
    if sys.platform == "linux":
        flags = _KEEP_SIZE | _PUNCH_HOLE
        _libc().fallocate(file, flags, ctypes.c_int64(offset), ctypes.c_int64(length))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
