"""Storage formats that hold many images in a file: where each stands, and how they are written. No framework is needed.

Every module has `stored`, which lists the images of a file without decoding them, and `Writer`. Damage is listed too: what
was read around it is right, and nothing behind it is lost as long as a next record can be found.
"""

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from lockstep.system.files import replacing

NO_LABEL = -1
Bytes = bytes | memoryview
_PIECES = os.sysconf("SC_IOV_MAX")
"""Written at a time."""
_AHEAD_BYTES = 2**19
"""Read ahead at a time."""


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


class Sample(NamedTuple):
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

    def __init__(self, path: Path, *, read_ahead: bool = False) -> None:
        """Reading ahead is for who then reads all of it in order."""
        self.descriptor = -1
        """Of the open file."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.descriptor).st_size
        self._ahead = 0 if read_ahead else self.size

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def state(self) -> tuple[int, int]:
        """Return size and time of the last change, in nanoseconds, as they are now."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes. Raises `ValueError` if the file ends before."""
        if self._ahead < offset + length <= self.size:
            self._read_on(offset + length)
        data = os.pread(self.descriptor, length, offset)
        while len(data) < length:  # Linux reads 2 GiB at most, and network file systems less
            more = os.pread(self.descriptor, length - len(data), offset + len(data))
            if not more:
                raise ValueError(f"the file ends at byte {offset + len(data)}, expected {length} bytes from {offset}")
            data += more
        return data

    def _read_on(self, end: int) -> None:
        """Have bytes in the system's memory up to an end, and somewhat further.

        Reading them to memory that nobody looks at is twice as fast as advising Linux to.
        """
        while self._ahead < end:
            begin, self._ahead = self._ahead, min(self._ahead + _AHEAD_BYTES, self.size)
            try:
                os.preadv(self.descriptor, [bytearray(1)], self._ahead - 1, os.RWF_NOWAIT)
            except BlockingIOError:
                os.preadv(self.descriptor, [bytearray(self._ahead - begin)], begin)
            except OSError:  # a file system that cannot tell
                self._ahead = self.size

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with bytes. Raises `ValueError` if the file ends before."""
        if os.preadv(self.descriptor, [memory], offset) < len(memory):
            memory[:] = self.read(offset, len(memory))


class Appended(ABC):
    """A file of whole records, written as `<name>.partial` until it is finished; a context manager.

    What a killed process left of a last record is cut off; those before it stay.
    """

    def __init__(self, path: Path, ends: Iterable[int]) -> None:
        """`ends` is where each of the whole records ends that are there already."""
        self.path = path
        self._ends = array("q", [0, *ends])
        end = self._ends[-1]
        partial = _partial(path)
        self._file = partial.open("r+b" if partial.exists() else "xb", buffering=0)
        # Never to length 0 without need: ext4 writes such a file to the disk when it is closed.
        if self._file.seek(0, os.SEEK_END) > end:
            self._file.truncate(end)
            self._file.seek(end)

    @property
    def written(self) -> int:
        """Whole samples in the file."""
        return len(self._ends) - 1

    @property
    def length(self) -> int:
        """Bytes of the file when it is finished."""
        return self._ends[-1]

    @staticmethod
    @abstractmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample as it stands in the file, in pieces. Raises `ValueError` if it is too long."""

    def records(self, samples: Iterable[Sample]) -> list[list[Bytes]]:
        """Return samples as they stand in the file, in pieces. Raises `ValueError` if one is too long."""
        return [self.record(sample) for sample in samples]

    def extend(self, records: Iterable[list[Bytes]]) -> None:
        """Append records."""
        pieces: list[Bytes] = []
        for record in records:
            pieces += record
            self._ends.append(self._ends[-1] + sum(map(len, record)))
        self._write(pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _write(self, pieces: list[Bytes]) -> None:
        with naming(self.path):
            for first in range(0, len(pieces), _PIECES):
                some = pieces[first : first + _PIECES]
                written = os.writev(self._file.fileno(), some)
                if written < sum(map(len, some)):  # of more than 2 GiB, or where the disk is full
                    write_all(self._file, memoryview(b"".join(some))[written:])

    def finish(self) -> None:
        """Give the file its name. The system brings it to the disk later, as it does with copies."""
        with naming(self.path):  # a network file system may say only now that its disk is full
            self._file.close()
        _partial(self.path).replace(self.path)


def write_all(file: FileIO, data: Bytes) -> None:
    """Write bytes to a file without a buffer, which may take less of them at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give the system's errors the name of a file, which those of an open one lack."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def begun(path: Path) -> Path | None:
    """Return the file that an interrupted writer left, if there is one."""
    partial = _partial(path)
    return partial if partial.exists() else None


def unfinish(path: Path) -> None:
    """Have a file be one that an interrupted writer left."""
    path.replace(_partial(path))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextmanager
def atomically(path: Path) -> Iterator[TextIO]:
    """Yield a text file that appears under its name when it is complete."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        yield file
