"""Images of a source, in a fixed order: their places, labels and names, in arrays."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lockstep.data.decoding.orientation import shown_sizes
from lockstep.data.sources import FOLDER, Source, name_folder
from lockstep.system.errors import DataError
from lockstep.system.regular_files import IMAGE, explain_failure, open_descriptor, read_descriptor
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.data.containers.places import Places
    from lockstep.data.stores.eviction import Reads
    from lockstep.data.stores.places import StoredPlaces

ROW = np.dtype(
    [
        ("offset", "<i8"),
        ("file", "<u4"),
        ("length", "<u4"),
        ("label", "<i4"),
        ("height", "<u2"),
        ("width", "<u2"),
    ]
)
"""The row of an image: offset of its first byte in its file, number of the file, length in bytes,
class, and size in pixels. For an image in several parts, the offset is the bitwise inverse of its
record's offset."""
_OPEN_FILES = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
CHANGED = "its bytes were changed after indexing"
Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""


def add_up(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds what it is called with to the amount done, and reports it."""
    done = 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(done, total)

    return advance


def encode_name(name: str) -> bytes:
    """Return a name as bytes of the file system."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # JSON allows names that file systems do not
        return name.encode("utf-8", "replace")


@dataclass(frozen=True)
class Quarantined:
    """An image or a part of a file that cannot be used, and the reason."""

    file: str
    """`class/image`, or `file@first byte`."""
    reason: str


def printable(name: str) -> str:
    """Return a name that any file and terminal accepts: bytes that are not UTF-8 are replaced, and
    so are lone surrogates of a JSON text."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", name)


@dataclass(frozen=True)
class Names:
    """Many texts in two arrays. Each takes its length plus 4 bytes; the maximum is 4 GiB in all."""

    text: np.ndarray
    """uint8: the bytes of all names as in the file system, one after the other."""
    ends: np.ndarray
    """uint32 [names]: the end of each name in `text`."""

    @classmethod
    def of(cls, names: Iterable[bytes]) -> "Names":
        """Return names as arrays."""
        names = list(names)
        ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        if len(ends) and ends[-1] >= 2**32:
            raise DataError(
                f"the names of {len(names)} images take {ends[-1]} bytes; the limit is 4 GiB"
            )
        return cls(np.frombuffer(b"".join(names), np.uint8), ends.astype(np.uint32))

    def __getitem__(self, i: int) -> bytes:
        start = int(self.ends[i - 1]) if i else 0
        return self.text[start : int(self.ends[i])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        text = self.text.tobytes()
        start = 0
        for end in self.ends.tolist():
            yield text[start:end]
            start = end

    def __len__(self) -> int:
        return len(self.ends)


def read_file(path: str) -> tuple[bytes, int]:
    """Return the bytes of an image's file and the time of its last change, in microseconds modulo
    2**32.

    Raises `OSError` if it cannot be read, is a pipe or a device, or is too long for an image.
    """
    descriptor, status = open_descriptor(path, IMAGE)
    try:
        data = read_descriptor(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    return data, status.st_mtime_ns // 1000 % 2**32


@dataclass(frozen=True)
class Images:
    """Images of a source, in a fixed order."""

    source: Source
    rows: np.ndarray
    """[images] of `ROW`."""
    names: Names
    """The name of every image: `class/file` in an image folder, otherwise the name in the file,
    which may be empty."""
    classes: tuple[str, ...]
    numbered: bool
    """Whether the names of the classes are only their numbers."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shards(self) -> np.ndarray | None:
        """The number of the file that holds each image, uint32 [images]; None if every image is a
        file."""
        return None if self.source.format == FOLDER else self.rows["file"]

    def name(self, sample: int) -> str:
        """Return the name of a sample; empty if its format stores none."""
        return os.fsdecode(self.names[sample])

    def path(self, sample: int) -> str:
        """Return the path of the file that holds a sample."""
        return f"{self.source.root}/{self._file_name(sample)}"

    def place(self, sample: int) -> str:
        """Return a sample's place as in a quarantine: `class/image`, or `file@first byte`."""
        if self.source.format == FOLDER:
            return self.name(sample)
        offset = int(self.rows["offset"][sample])
        return f"{self._file_name(sample)}@{offset if offset >= 0 else ~offset}"

    def explain_change(self, sample: int, how: str) -> DataError:
        """Return the error that says how a file differs from the indexed one, and what to do."""
        name = "" if self.source.format == FOLDER else f" ({self.name(sample)})"
        root = name_folder(self.source.root)
        again = "start again"
        if root == str(self.source.root):
            again = f"index the images again: lockstep data index {shlex.quote(root)}"
        return DataError(
            f"{root}/{self.place(sample)}{name} is not the image that was indexed: {how}. Put it"
            f" back, or {again}"
        )

    def explain_failure(self, sample: int, error: OSError) -> DataError:
        """Return the error for an image that the system failed to read: the image itself may be
        whole."""
        root = name_folder(self.source.root)
        return DataError(
            f"{root}/{self.place(sample)} cannot be read: {explain_failure(error)}. Start again"
            " once its disk or network answers; to leave the image out instead: lockstep data check"
            f" {shlex.quote(root)} --quarantine"
        )

    def _file_name(self, sample: int) -> str:
        if self.source.format == FOLDER:
            return self.name(sample)
        return self.source.files[int(self.rows["file"][sample])]

    def read_encoded(self, sample: int) -> bytes:
        """Return the current bytes of an image. Raises `OSError`, or `ValueError` if its file has
        changed."""
        if not self.source.files:
            return read_file(self.path(sample))[0]
        row = self.rows[sample]
        offset = int(row["offset"])
        places = self._places(int(row["file"]))
        if offset < 0:
            from lockstep.data.containers import CONTAINERS

            image: bytes = CONTAINERS["recordio"].load().image_in_parts(places, ~offset)
            return image
        return places.read(offset, int(row["length"]))

    @cached_property
    def is_stored(self) -> bool:
        """Whether the images are in an object store."""
        return bool(self.source.files) and self._stored_places(0) is not None

    def _stored_places(self, file: int) -> "StoredPlaces | None":
        """Return a file that is an object of a store; None for one of this machine."""
        from lockstep.data.stores.places import StoredPlaces

        places = self._places(file)
        return places if isinstance(places, StoredPlaces) else None

    def prefetch(self, samples: np.ndarray, most_gap: int) -> None:
        """Begin to fetch images of an object store, and what is between them if that is at most
        `most_gap` bytes. Images that are objects are fetched one by one."""
        if self.source.format == FOLDER:
            most_gap = 0
        begins, ends = self._find_ranges(samples)
        by_file: dict[int, list[tuple[int, int]]] = {}
        for file, begin, end in zip(
            self.rows["file"][samples].tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            by_file.setdefault(file, []).append((begin, end))
        for file, ranges in by_file.items():
            places = self._stored_places(file)
            if places is not None:
                from lockstep.data.stores.transfer import Part

                parts = [Part(places.item, begin, end) for begin, end in ranges]
                places.transfer.prefetch(parts, most_gap)

    def _find_ranges(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets of the first bytes of images in their files, and of their ends."""
        rows = self.rows[samples]
        begins = np.where(rows["offset"] < 0, ~rows["offset"], rows["offset"])
        return begins, begins + rows["length"]

    @contextmanager
    def foreseeing(self, list_steps: Callable[[], np.ndarray]) -> Iterator[None]:
        """Tell the cache of an object store, while the block runs, when images are read next.

        `list_steps` returns the step of each image, int32 [images], `NEVER` if it is not known.
        """
        places = self._stored_places(0)
        assert places is not None
        transfer = places.transfer
        transfer.list_reads = lambda: self._list_reads(list_steps())
        try:
            yield
        finally:
            transfer.list_reads = tuple

    def _list_reads(self, steps: np.ndarray) -> "Iterator[Reads]":
        from lockstep.data.stores.eviction import Reads

        for file, samples in enumerate(self._samples_by_file):
            places = self._stored_places(file)
            if places is not None:
                yield Reads(places.item.name, *self._find_ranges(samples), steps[samples])

    @cached_property
    def _samples_by_file(self) -> list[np.ndarray]:
        files = self.rows["file"]
        order = np.argsort(files, kind="stable").astype(np.uint32)
        ends = np.cumsum(np.bincount(files, minlength=len(self.source.files)))
        return np.split(order, ends[:-1])

    def stop_prefetch(self) -> None:
        """Stop fetching what is not needed yet."""
        places = self._stored_places(0) if self.is_stored else None
        if places is not None:
            places.transfer.cancel()

    def read_together(self, samples: Sequence[int], memory: memoryview) -> list[memoryview] | None:
        """Return the bytes of images, read into `memory` in one call; None if they are not close
        together in one file.

        Raises the same errors as `read_encoded`.
        """
        if self.source.format == FOLDER:
            return None
        rows = self.rows[samples]
        offsets = rows["offset"].tolist()
        lengths = rows["length"].tolist()
        begin = min(offsets)
        end = max(map(sum, zip(offsets, lengths, strict=True)))
        files = set(rows["file"].tolist())
        if begin < 0 or end - begin > len(memory) or len(files) > 1:
            return None
        self._places(files.pop()).read_into(memory[: end - begin], begin)
        starts = (offset - begin for offset in offsets)
        return [
            memory[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]

    @cached_property
    def _places(self) -> "Callable[[int], Places]":
        from lockstep.data.stores.places import open_places

        # A data set may have more files than a process may keep open.
        root = self.source.root
        files = self.source.files
        # The function does not refer to `self`, so that unused images are freed at once, and their
        # files are closed.
        return lru_cache(_OPEN_FILES)(lambda file: open_places(root / files[file]))


class ImageSizes:
    """Heights and widths of images, looked up on demand: an array of all of them may be too
    large."""

    def __init__(self, rows: np.ndarray, orientations: np.ndarray | None = None) -> None:
        self._rows = rows
        self._orientations = orientations

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, samples: np.ndarray | slice) -> np.ndarray:
        """Return heights and widths: int64 [N, 2], as the images are shown if there are
        orientations, else as they are stored."""
        rows = self._rows[samples]
        sizes = np.stack([rows["height"], rows["width"]], axis=1).astype(np.int64)
        if self._orientations is None:
            return sizes
        return shown_sizes(sizes, self._orientations[samples])


AnyImages = TypeVar("AnyImages", bound=Images)


def are_numbers_of(images: Images, classes: tuple[str, ...]) -> bool:
    """Return whether classes are only the numbers stored with images: those of a run without class
    names."""
    is_stored = images.source.format in ("recordio", "tfrecord")
    numbers = tuple(map(str, range(max(len(classes), 1))))
    return is_stored and classes == numbers and not set(images.classes) <= set(classes)


def relabel(images: AnyImages, classes: tuple[str, ...]) -> AnyImages:
    """Return the images with labels that are positions in `classes`. Raises `DataError` if a class
    is not in `classes`."""
    own = images.classes
    title = images.source.title
    if own == classes:
        return images
    if images.numbered or are_numbers_of(images, classes):
        highest = int(images.rows["label"].max(initial=-1))
        if highest >= len(classes):
            raise DataError(
                f"{title} has an image of class {highest}; training has"
                f" {format_count(len(classes), 'class')}, counted from 0"
            )
        return replace(images, classes=classes)
    used = {own[label] for label in np.unique(images.rows["label"]).tolist()}
    unknown = sorted(used - set(classes))
    if unknown:
        raise DataError(
            f"{title} has classes that the training images do not have:"
            f" {', '.join(unknown[:5])}; add training images of them, or leave them out"
        )
    positions = {name: i for i, name in enumerate(classes)}
    rows = np.array(images.rows)
    rows["label"] = np.array([positions.get(name, 0) for name in own], np.int32)[rows["label"]]
    return replace(images, rows=rows, classes=classes)
