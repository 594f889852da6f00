"""Parts of an object on the disk: a file with holes where nothing was fetched, and a bit for each
block, which is set if the file has it."""

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
        if len(flags) != -(-blocks // 8):
            flags = bytes(-(-blocks // 8))
            self._flags.write_bytes(flags)
            path.unlink(missing_ok=True)
        bits = np.unpackbits(np.frombuffer(flags, np.uint8), count=blocks)
        self._present = bits.astype(np.bool_)

    @contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        """Open a file for one call: there may be more objects than a process may open."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def _note_present(self, first: int, last: int) -> None:
        begin = first // 8
        bits = np.packbits(self._present[begin * 8 : -(-last // 8) * 8])
        with self._open(self._flags) as file:
            os.pwrite(file, bits.tobytes(), begin)

    def list_blocks(self) -> np.ndarray:
        """Return the numbers of the blocks that are on the disk: int32 [blocks]."""
        return np.flatnonzero(self._present).astype(np.int32)

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

    def write(self, begin: int, data: memoryview) -> int:
        """Keep fetched bytes: whole blocks, or up to the end of the object. Return by how many
        bytes there are more on the disk, where each block takes its whole length."""
        offset = begin
        with self._lock, self._open(self._path) as file:
            while data:
                written = os.pwrite(file, data, offset)
                offset += written
                data = data[written:]
            first = begin // BLOCK_BYTES
            last = -(-offset // BLOCK_BYTES)
            added = int(np.count_nonzero(~self._present[first:last]))
            self._present[first:last] = True  # only when they are written
            self._note_present(first, last)
        return added * BLOCK_BYTES

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

    def drop(self, blocks: np.ndarray) -> int:
        """Free blocks, given by their numbers in increasing order; return by how many bytes there
        are fewer on the disk."""
        with self._lock:
            blocks = blocks[self._present[blocks]]
            if not len(blocks):
                return 0
            self._present[blocks] = False
            self._note_present(int(blocks[0]), int(blocks[-1]) + 1)
            with self._open(self._path) as file:
                for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
                    _punch_hole(file, int(run[0]) * BLOCK_BYTES, len(run) * BLOCK_BYTES)
        return len(blocks) * BLOCK_BYTES


def _punch_hole(file: int, offset: int, length: int) -> None:
    """Give a part of a file back to the file system. Where it cannot do that, the part stays on the
    disk until it is overwritten."""
    if sys.platform == "linux":
        flags = _KEEP_SIZE | _PUNCH_HOLE
        _libc().fallocate(file, flags, ctypes.c_int64(offset), ctypes.c_int64(length))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
