"""Storage formats that hold many images in a file: where each stands, and how they are written. No framework is needed.

Every module has `stored`, which lists the images of a file without decoding them, and `Writer`. Damage is listed too: what
was read around it is right, and nothing behind it is lost as long as a next record can be found.
"""

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TextIO

NO_LABEL = -1
Bytes = bytes | memoryview
_GIVEN_BYTES = 2**22
"""Given to the disk at a time."""
_PIECES = os.sysconf("SC_IOV_MAX")
"""Written at a time."""


class Stored(NamedTuple):
    """An image as a file holds it."""

    offset: int
    """Of its first byte; of its record, if it stands there in several parts."""
    length: int
    """In bytes."""
    label: int
    """Counted from 0, or `NO_LABEL` where `class_name` alone says it."""
    name: str = ""
    """A path or key, if the format keeps one."""
    class_name: str = ""
    number: int = -1
    """Its place in the order the data set was listed in, if the format keeps one."""
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `begin` to `end` of a file that hold no usable image, and why."""

    begin: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """An image to be written."""

    number: int
    """Its place in the data set, from 0."""
    name: str
    """`class/file`, or a file's name alone."""
    label: int
    class_name: str
    data: Bytes
    """The encoded image."""
    height: int
    width: int


class Places:
    """A file that is read by place, from several threads at once; closed when it is forgotten."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def state(self) -> tuple[int, int]:
        """Return size and time of the last change, in nanoseconds, as they are now."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes. Raises `ValueError` if the file ends before."""
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:  # Linux reads 2 GiB at most, and network file systems less
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise ValueError(f"the file ends at byte {offset + len(data)}, expected {length} bytes from {offset}")
            data += more
        return data

    def bring(self, memory: memoryview, offset: int) -> None:
        """Have bytes in the system's memory by reading them to this, unless the last of them is there or nobody knows.

        Twice as fast as advising Linux to read them.
        """
        try:
            os.preadv(self._descriptor, [bytearray(1)], min(offset + len(memory), self.size) - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            os.preadv(self._descriptor, [memory], offset)
        except OSError:  # a file system that cannot tell
            pass

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with bytes. Raises `ValueError` if the file ends before."""
        if os.preadv(self._descriptor, [memory], offset) < len(memory):
            memory[:] = self.read(offset, len(memory))


class Appended(ABC):
    """A file of whole records, written as `<name>.partial` until it is finished; a context manager.

    What a killed process left of a last record is cut off; those before it stay.
    """

    def __init__(self, path: Path, ends: Iterable[int]) -> None:
        """`ends` is where each of the whole records ends that are there already."""
        self.path = path
        self._ends = array("q", [0, *ends])
        self._given = end = self._ends[-1]
        self._disk = ThreadPoolExecutor(1)
        partial = _partial(path)
        self._file = partial.open("r+b" if partial.exists() else "xb", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)

    @property
    def written(self) -> int:
        """Whole samples in the file."""
        return len(self._ends) - 1

    @staticmethod
    @abstractmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample as it stands in the file, in pieces. Raises `ValueError` if it is too long."""

    def extend(self, records: Iterable[list[Bytes]]) -> None:
        """Append records."""
        pieces: list[Bytes] = []
        for record in records:
            pieces += record
            self._ends.append(self._ends[-1] + sum(map(len, record)))
        self._write(pieces)
        end = self._ends[-1]
        if end - self._given >= _GIVEN_BYTES:
            # Linux begins to write what it is told to forget, and `finish` has less to wait for.
            self._disk.submit(os.posix_fadvise, self._file.fileno(), self._given, end - self._given, os.POSIX_FADV_DONTNEED)
            self._given = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._disk.shutdown()
        self._file.close()

    def _write(self, pieces: list[Bytes]) -> None:
        with naming(self.path):
            for first in range(0, len(pieces), _PIECES):
                some = pieces[first : first + _PIECES]
                written = os.writev(self._file.fileno(), some)
                if written < sum(map(len, some)):  # of more than 2 GiB, or where the disk is full
                    rest = memoryview(b"".join(some))[written:]
                    while rest:
                        rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        """Bring the file to the disk and give it its name."""
        self._disk.shutdown()
        with naming(self.path):
            os.fsync(self._file.fileno())
        self._file.close()
        _partial(self.path).replace(self.path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give the system's errors the name of a file, which those of an open one lack."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def begun(path: Path) -> Path | None:
    """Return the file that an interrupted writer left, if there is one."""
    partial = _partial(path)
    return partial if partial.exists() else None


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextmanager
def atomically(path: Path) -> Iterator[TextIO]:
    """Give a text file that appears under its name when it is complete."""
    partial = _partial(path)
    with partial.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        yield file
    partial.replace(path)
