"""A file that holds many images, read at any offset, and what a pass over it may cost."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

from lockstep.system.files import naming
from lockstep.system.regular_files import ANY_SIZE, IMAGE, find_data, is_sparse, open_descriptor

_AHEAD_BYTES = 2**19
"""This many bytes are read ahead at a time."""
MOST_BYTES = IMAGE.most_bytes + 2**20
"""At most this many bytes are read at once: an image, and what describes it."""
_READ_COST = 2**6
"""A read costs as much as its bytes, and this many more."""
_LEAST_WORK = 2**22
_WORK_PER_BYTE = 2**6
"""A pass over a file may cost this much, in bytes, for each byte of the file. Records of 8 bytes
cost most: about 50."""
_FIRST_CHUNK = 2**7
_LAST_CHUNK = 2**20


class Stopped(Exception):
    """The command that reads a file was interrupted."""


class Budget:
    """The work of a pass over a file, which is proportional to the length of the file.

    Every read is deducted, so that records that lead to each other again and again cannot take
    hours, and an interruption waits for at most one read.
    """

    def __init__(self, size: int, stopped: Event | None = None) -> None:
        """`stopped` is set when the command is interrupted."""
        self._rest = _LEAST_WORK + _WORK_PER_BYTE * size
        self._stopped = stopped

    def spend(self, length: int) -> None:
        """Deduct a read. Raises `Stopped`, or `ValueError` if nothing is left."""
        if self._stopped is not None and self._stopped.is_set():
            raise Stopped
        self._rest -= length + _READ_COST
        if self._rest < 0:
            raise ValueError(
                "its records share bytes many times; expected each byte in one record. Write the"
                " file again"
            )


class Places:
    """A file that several threads read at any offset at the same time; it is closed when nothing
    refers to it."""

    budget: Budget | None = None
    """What reads may cost; None: any number of reads of images that are listed."""

    def __init__(self, path: Path, *, read_ahead: bool = False) -> None:
        """Open the file. Use `read_ahead` if all of the file is then read in order."""
        self.descriptor = -1
        """The descriptor of the open file, or -1."""
        self.path = path
        self.descriptor, status = open_descriptor(path, ANY_SIZE)
        self.size = status.st_size
        self._ahead = 0 if read_ahead else self.size

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def state(self) -> tuple[int, int]:
        """Return the file's current size and the time of its last change in nanoseconds."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises `ValueError` as `check` does or if the file
        ends before, and `OSError` with the file's name."""
        self.check(offset, length)
        if self.budget is not None:
            self.budget.spend(length)
        with naming(self.path):
            return self._read(offset, length)

    def check(self, offset: int, length: int) -> None:
        """Raise `ValueError` if a range is too long to be read, or was never written."""
        if length > MOST_BYTES:
            raise ValueError(
                f"{length} bytes from byte {offset} are too many; expected at most {MOST_BYTES}"
            )
        if is_sparse(self.descriptor, offset, offset + length):
            raise ValueError(f"nearly all of the {length} bytes from byte {offset} are a hole")

    def chunks(self, start: int, overlap: int) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of consecutive chunks, of which each repeats the last
        `overlap` bytes of the one before.

        Holes are left out, and the first chunks are short: a search costs as much as what it
        passes.
        """
        length = _FIRST_CHUNK
        while start + overlap < self.size:
            start = max(start, self._find_data(start + overlap) - overlap)
            chunk = self.read(start, min(max(length, overlap + 1), self.size - start))
            yield start, chunk
            start += max(len(chunk) - overlap, 1)
            length = min(2 * length, _LAST_CHUNK)

    def _find_data(self, offset: int) -> int:
        return find_data(self.descriptor, offset, self.size)

    def _read(self, offset: int, length: int) -> bytes:
        if self._ahead < offset + length <= self.size:
            self._read_on(offset + length)
        data = os.pread(self.descriptor, length, offset)
        # One call reads at most 2 GiB on Linux, and less on network file systems.
        while len(data) < length:
            more = os.pread(self.descriptor, length - len(data), offset + len(data))
            if not more:
                raise ValueError(
                    f"the file ends at byte {offset + len(data)}, expected {length} bytes from"
                    f" {offset}"
                )
            data += more
        return data

    def _read_on(self, end: int) -> None:
        """Make the system cache the file up to `end`, and somewhat further.

        Reading into memory that is not used is twice as fast as advising Linux to read ahead.
        """
        while self._ahead < end:
            begin = self._ahead
            self._ahead = min(self._ahead + _AHEAD_BYTES, self.size)
            try:
                os.preadv(self.descriptor, [bytearray(1)], self._ahead - 1, os.RWF_NOWAIT)
            except BlockingIOError:
                os.preadv(self.descriptor, [bytearray(self._ahead - begin)], begin)
            except OSError:  # a file system that does not support RWF_NOWAIT
                self._ahead = self.size

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with bytes from `offset`. Raises as `read` does."""
        with naming(self.path):
            count = os.preadv(self.descriptor, [memory], offset)
        if count < len(memory):
            memory[:] = self.read(offset, len(memory))
