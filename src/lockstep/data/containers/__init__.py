"""Storage formats that hold many images in one file: where each image is, and how files are
written.

No framework is needed. Every module of `CONTAINERS` has `scan_images`, which lists the images of a
file without decoding them, and `Writer`. Damage is listed too. The images before and after it are
intact, and reading continues at the next record that can be found.
"""

import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

from lockstep.data.containers.places import Places
from lockstep.system.files import naming
from lockstep.system.registry import make_table

CONTAINERS = make_table(__name__, "recordio", "tfrecord", "webdataset")
NO_LABEL = -1
Bytes = bytes | memoryview
_PIECES = os.sysconf("SC_IOV_MAX")
"""At most this many pieces are written in one call."""


def split_path(path: str) -> list[str]:
    """Return the parts of a path without empty ones, `.` and `..`.

    >>> split_path("./train//cat"), split_path("../cat")
    (['train', 'cat'], ['cat'])
    """
    return [part for part in path.split("/") if part not in ("", ".", "..")]


class Stored(NamedTuple):
    """The place of an image in a file, and what the file says about it."""

    offset: int
    """Offset of its first byte; offset of its record if the image is split into several parts."""
    length: int
    """Length in bytes."""
    label: int
    """The class, counted from 0; `NO_LABEL` if only `class_name` gives the class."""
    name: str = ""
    """A path or key, if the format stores one."""
    class_name: str = ""
    number: int = -1
    """Its position in the order in which the data set was listed, if the format stores one."""
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `begin` to `end` of a file, which hold no usable image, and the reason."""

    begin: int
    end: int
    reason: str


class Sample(NamedTuple):
    """An image to write."""

    number: int
    """Its position in the data set, from 0."""
    name: str
    """`class/file`, or only the name of a file."""
    label: int
    class_name: str
    data: Bytes
    """The encoded image."""
    height: int
    width: int


class Appended(AbstractContextManager["Appended"]):
    """A file of complete records, written as `<name>.partial` until it is finished; a context
    manager.

    If a killed process left a part of a last record, it is cut off; the records before it stay.
    """

    def __init__(self, path: Path) -> None:
        """Open the file to append to the complete records that it already holds."""
        self.path = path
        self._ends = array("q", [0])
        partial = _partial(path)
        if partial.exists():
            for end in self.scan_ends(Places(partial)):
                if isinstance(end, Damage):
                    break
                self._ends.append(end)
        end = self._ends[-1]
        self._file = partial.open("r+b" if partial.exists() else "xb", buffering=0)
        # Do not truncate to length 0 without need: ext4 writes such a file to the disk when it is
        # closed.
        if self._file.seek(0, os.SEEK_END) > end:
            self._file.truncate(end)
            self._file.seek(end)

    @property
    def written(self) -> int:
        """Number of complete samples in the file."""
        return len(self._ends) - 1

    @property
    def length(self) -> int:
        """Length in bytes of the finished file."""
        return self._ends[-1]

    @staticmethod
    @abstractmethod
    def scan_ends(file: Places) -> Iterator[int | Damage]:
        """Yield the end of each complete sample of a file, and the damage between them."""

    @staticmethod
    @abstractmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample's bytes in the file, in pieces. Raises `ValueError` if it is too long."""

    def records(self, samples: Iterable[Sample]) -> list[list[Bytes]]:
        """Return the bytes of samples in the file, in pieces. Raises `ValueError` if one is too
        long."""
        return [self.record(sample) for sample in samples]

    def describe(self, rows: Iterable[tuple[int, int, str]]) -> list[Path]:
        """Write the files that describe this one, from number, label and name of every sample;
        return their paths. Not all formats have such files."""
        return []

    def extend(self, records: Iterable[list[Bytes]]) -> None:
        """Append records."""
        pieces: list[Bytes] = []
        for record in records:
            pieces += record
            self._ends.append(self._ends[-1] + sum(map(len, record)))
        self._write(pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _write(self, pieces: list[Bytes]) -> None:
        with naming(self.path):
            for first in range(0, len(pieces), _PIECES):
                some = pieces[first : first + _PIECES]
                written = os.writev(self._file.fileno(), some)
                if written < sum(map(len, some)):  # more than 2 GiB, or a full disk
                    write_all(self._file, memoryview(b"".join(some))[written:])

    def finish(self) -> None:
        """Give the file its final name. The system writes it to the disk later, as after copying a
        file."""
        # A network file system may report a full disk only when the file is closed.
        with naming(self.path):
            self._file.close()
        _partial(self.path).replace(self.path)


def write_all(file: FileIO, data: Bytes) -> None:
    """Write all bytes to an unbuffered file, which may accept only a part of them in one call."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def unfinish(path: Path) -> None:
    """Rename a file as if an interrupted writer had left it."""
    path.replace(_partial(path))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
