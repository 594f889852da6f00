"""A file that holds many images, read at any offset."""

import os
from pathlib import Path

from lockstep.system.regular_files import ANY_SIZE, open_descriptor

_AHEAD_BYTES = 2**19
"""This many bytes are read ahead at a time."""


class Places:
    """A file that several threads read at any offset at the same time; it is closed when nothing
    refers to it."""

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
        """Return `length` bytes from `offset`. Raises `ValueError` if the file ends before."""
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
        """Fill `memory` with bytes from `offset`. Raises `ValueError` if the file ends before."""
        if os.preadv(self.descriptor, [memory], offset) < len(memory):
            memory[:] = self.read(offset, len(memory))
