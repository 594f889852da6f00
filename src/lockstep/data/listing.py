"""What a source holds, without decoding: place, label and name of every image, in the same order
for all formats."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

import numpy as np

from lockstep.data.containers import (
    NO_LABEL,
    Damage,
    Places,
    Stored,
    recordio,
    tfrecord,
    webdataset,
)
from lockstep.data.sources import FOLDER, Source, class_files, class_folders
from lockstep.system.errors import DataError
from lockstep.system.machine import cores
from lockstep.system.regular_files import (
    IMAGE,
    RECORDS,
    open_descriptor,
    read_descriptor,
    read_regular_text,
)

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
CLASSES = "classes.txt"
"""A file next to files that store only numbers as labels: the names of the classes, one on each
line, class 0 first."""
MOST_CLASSES = 2**20
MOST_BYTES = IMAGE.most_bytes
"""The maximum size of an image in bytes; a row has room for it."""
STORED: dict[str, Callable[[Path], Iterator[Stored | Damage]]] = {
    "recordio": recordio.scan_images,
    "tfrecord": tfrecord.scan_images,
    "webdataset": webdataset.scan_images,
}
_AT_ONCE = 2**10
_PROGRESS_SEC = 0.2
_IS_NUMBER = re.compile(rb"\d+(?:\.\w+)?")
"""A name that is only the position of the image."""
_OPEN_FILES = 64
Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""


@dataclass(frozen=True)
class Quarantined:
    """An image or a part of a file that cannot be used, and the reason."""

    file: str
    """`class/image`, or `file@first byte`."""
    reason: str


def printable(name: str) -> str:
    """Return a name that any file and terminal accepts: bytes that are not UTF-8 are replaced."""
    return os.fsencode(name).decode(errors="replace")


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

    def name(self, sample: int) -> str:
        """Return the name of a sample; empty if its format stores none."""
        return os.fsdecode(self.names[sample])

    def path(self, sample: int) -> str:
        """Return the path of the file that holds a sample."""
        is_folder = self.source.format == FOLDER
        return f"{self.source.root}/{self.name(sample) if is_folder else self.source.files[int(self.rows['file'][sample])]}"

    def place(self, sample: int) -> str:
        """Return a sample's place as in a quarantine: `class/image`, or `file@first byte`."""
        if self.source.format == FOLDER:
            return self.name(sample)
        offset = int(self.rows["offset"][sample])
        return f"{self.source.files[int(self.rows['file'][sample])]}@{offset if offset >= 0 else ~offset}"

    def read_encoded(self, sample: int) -> bytes:
        """Return the current bytes of an image. Raises `OSError`, or `ValueError` if its file has
        changed."""
        if self.source.format == FOLDER:
            return read_file(self.path(sample))[0]
        row = self.rows[sample]
        offset = int(row["offset"])
        places = self._places(int(row["file"]))
        return (
            places.read(offset, int(row["length"]))
            if offset >= 0
            else recordio.image_in_parts(places, ~offset)
        )

    def read_together(self, samples: Sequence[int], memory: memoryview) -> list[memoryview] | None:
        """Return the bytes of images, read into `memory` in one call; None if they are not close
        together in one file.

        Raises the same errors as `read_encoded`.
        """
        if self.source.format == FOLDER:
            return None
        files, offsets, lengths = (
            self.rows[column][samples].tolist() for column in ("file", "offset", "length")
        )
        begin = min(offsets)
        end = max(map(sum, zip(offsets, lengths, strict=True)))
        if begin < 0 or end - begin > len(memory) or len(set(files)) > 1:
            return None
        self._places(files[0]).read_into(memory[: end - begin], begin)
        return [
            memory[offset - begin :][:length]
            for offset, length in zip(offsets, lengths, strict=True)
        ]

    @cached_property
    def _places(self) -> Callable[[int], Places]:
        # A data set may have more files than a process may keep open.
        root = self.source.root
        files = self.source.files
        # The function does not refer to `self`, so that unused images are freed at once, and their
        # files are closed.
        return lru_cache(_OPEN_FILES)(lambda file: Places(root / files[file]))


AnyImages = TypeVar("AnyImages", bound=Images)


@dataclass(frozen=True)
class Listing(Images):
    """Every image of a source. The rows do not have height and width, and in an image folder no
    length."""

    damaged: tuple[Quarantined, ...] = ()
    left_out: tuple[Quarantined, ...] = ()
    """The images that a quarantine leaves out."""


def list_images(
    source: Source,
    classes: tuple[str, ...] | None = None,
    *,
    first_label: int = 0,
    quarantine: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Listing:
    """Return the images of a source, without those whose places are keys of `quarantine`; its
    values are the reasons.

    `first_label` is the number of the first class in files that have numbers as labels. `progress`
    is called with the megabytes listed and the total; it is not called for an image folder.

    Labels are positions in `classes`, or in the source's own list. The images of a data set have
    the same order in every format:

    - RecordIO: by the number from im2rec.
    - Other formats: by class and name, or only by name if all names are numbers.
    - If numbers or names are missing or not unique: as stored.

    Raises `DataError` if a class is not in `classes`.
    """
    quarantine = quarantine or {}
    if source.format == FOLDER:
        listing = _of_folder(source, quarantine)
    else:
        listing = _of_files(source, first_label, quarantine, progress)
    return listing if classes is None else relabel(listing, classes)


def _of_folder(source: Source, quarantine: Mapping[str, str]) -> Listing:
    folders = class_folders(source.root)
    listed = read_classes(source)
    classes = tuple(folders) if listed is None or not set(folders) <= set(listed) else listed
    label_of = {name: label for label, name in enumerate(classes)}
    names = []
    labels = []
    left_out = []
    damaged = []
    for folder in sorted(folders, key=label_of.__getitem__):
        files, looping = class_files(source.root / folder)
        for file in files:
            name = f"{folder}/{file}"
            if name in quarantine:
                left_out.append(Quarantined(name, quarantine[name]))
            elif file in looping:
                damaged.append(Quarantined(name, os.strerror(errno.ELOOP)))
            else:
                names.append(_encoded(name))
                labels.append(label_of[folder])
    rows = np.zeros(len(names), ROW)
    rows["label"] = labels
    return Listing(
        source,
        rows,
        Names.of(names),
        classes,
        numbered=False,
        damaged=tuple(damaged),
        left_out=tuple(left_out),
    )


def _encoded(name: str) -> bytes:
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # JSON allows names that file systems do not
        return name.encode("utf-8", "replace")


@dataclass
class _File:
    """The contents of one file of a source."""

    rows: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    class_names: dict[int, str] = field(default_factory=dict)
    """The names of classes by label."""
    folders: dict[str, int] = field(default_factory=dict)
    """Temporary labels below 0 for classes that have a name and no number."""
    damaged: list[Quarantined] = field(default_factory=list)
    left_out: list[Quarantined] = field(default_factory=list)


def _of_files(
    source: Source, first_label: int, quarantine: Mapping[str, str], progress: Progress | None
) -> Listing:
    read = [0] * len(source.files)
    stopped = Event()
    total = sum((source.root / path).stat().st_size for path in source.files)
    # An interruption sets `stopped`; the threads then end at their next images.
    with ThreadPoolExecutor(cores()) as pool:
        work = [
            pool.submit(_listed, source, i, first_label, quarantine, read, stopped)
            for i in range(len(source.files))
        ]
        try:
            while wait(work, timeout=_PROGRESS_SEC).not_done:
                if progress is not None:
                    progress(sum(read) // 10**6, total // 10**6 + 1)
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
        files = [done.result() for done in work]
    folders = sorted({name for file in files for name in file.folders})
    rows = np.concatenate(
        [
            np.zeros(0, ROW),
            *(_numbered(part, file, folders) for file in files for part in file.rows),
        ]
    )
    if folders and any((part["label"] >= 0).any() for file in files for part in file.rows):
        raise DataError(
            f"{source.title}: some images have a number as their class, others a folder; expected"
            " one of them"
        )
    names = [name for file in files for name in file.names]
    class_names = {label: name for file in files for label, name in file.class_names.items()}
    classes = tuple(folders) if folders else _classes(source, rows["label"], class_names)
    order = _order(
        np.concatenate([np.zeros(0, np.int64), *(each for file in files for each in file.numbers)]),
        rows,
        names,
    )
    return Listing(
        source,
        rows[order],
        Names.of(names[i] for i in order.tolist()),
        classes or tuple(map(str, range(int(rows["label"].max(initial=-1)) + 1))),
        numbered=classes is None,
        damaged=tuple(bad for file in files for bad in file.damaged),
        left_out=tuple(bad for file in files for bad in file.left_out),
    )


def _listed(
    source: Source,
    number: int,
    first_label: int,
    quarantine: Mapping[str, str],
    read: list[int],
    stopped: Event,
) -> _File:
    """Return the contents of a file. Update `read` with the offset reached; end when `stopped` is
    set."""
    path = source.files[number]
    found = _File()
    stored = STORED[source.format](source.root / path)
    try:
        while not stopped.is_set() and (some := list(islice(stored, _AT_ONCE))):
            good = []
            for each in some:
                read[number] = each.end if isinstance(each, Damage) else each.offset
                place = f"{path}@{each.begin if isinstance(each, Damage) else each.offset}"
                if place in quarantine:
                    found.left_out.append(Quarantined(place, quarantine[place]))
                elif isinstance(each, Damage):
                    found.damaged.append(Quarantined(place, each.reason))
                elif each.length > MOST_BYTES:
                    found.damaged.append(Quarantined(place, f"{each.length} bytes are too many"))
                elif each.label == NO_LABEL:
                    good.append(each)
                elif 0 <= each.label - first_label <= MOST_CLASSES:
                    good.append(
                        each._replace(label=each.label - first_label) if first_label else each
                    )
                else:
                    found.damaged.append(Quarantined(place, f"its label is {each.label}"))
            found.rows.append(_rows(good, number, found.folders))
            found.numbers.append(np.array([each.number for each in good], np.int64))
            found.names += [_encoded(each.name) for each in good]
            found.class_names.update(
                (each.label, each.class_name) for each in good if each.class_name
            )
    except ValueError as error:
        raise DataError(f"{source.root / path}: {error}") from None
    return found


def _numbered(rows: np.ndarray, file: _File, folders: list[str]) -> np.ndarray:
    """Return rows in which temporary labels are replaced by positions in `folders`."""
    if file.folders:
        table = np.zeros(len(file.folders) + 1, np.int32)
        table[[-label for label in file.folders.values()]] = [
            folders.index(name) for name in file.folders
        ]
        rows = rows.copy()
        rows["label"] = np.where(
            rows["label"] < 0, table[np.maximum(-rows["label"], 0)], rows["label"]
        )
    return rows


def _rows(some: Sequence[Stored], file: int, folders: dict[str, int]) -> np.ndarray:
    """Return rows. A class without a number gets a new negative label, which is added to `folders`."""
    rows = np.zeros(len(some), ROW)
    rows["file"] = file
    rows["offset"] = [~each.offset if each.in_parts else each.offset for each in some]
    rows["length"] = [each.length for each in some]
    rows["label"] = [
        (
            each.label
            if each.label != NO_LABEL
            else folders.setdefault(each.class_name, -1 - len(folders))
        )
        for each in some
    ]
    return rows


def _order(numbers: np.ndarray, rows: np.ndarray, names: list[bytes]) -> np.ndarray:
    if len(numbers) and numbers.min() >= 0 and len(np.unique(numbers)) == len(numbers):
        return np.argsort(numbers, kind="stable")
    files = (name.rpartition(b"/")[2] for name in names)
    keys: list[tuple[int, bytes]] = list(zip(rows["label"].tolist(), files, strict=True))
    if all(_IS_NUMBER.fullmatch(name) for name in names):
        keys = [(0, name) for name in names]
    if all(names) and len(set(keys)) == len(keys):
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    return np.arange(len(names))


def _classes(
    source: Source, labels: np.ndarray, class_names: dict[int, str]
) -> tuple[str, ...] | None:
    """Return the names of the classes; None if their names are only their numbers."""
    listed = read_classes(source)
    count = int(labels.max()) + 1 if len(labels) else 0
    if listed is not None:
        if count > len(listed):
            raise DataError(
                f"{source.title} has an image of class {count - 1}, but {CLASSES} next to it lists"
                f" {len(listed)} classes, counted from 0. Complete the list. If the labels start at"
                " 1, write the images again with: lockstep data pack --first-label 1"
            )
        return listed
    names = [class_names.get(label) or str(label) for label in range(count)]
    return tuple(names) if class_names and len(set(names)) == count else None


def read_classes(source: Source) -> tuple[str, ...] | None:
    """Return the names in `classes.txt` in a source's folder or in the folder above; None if there
    is no such file."""
    for folder in (source.root, source.root.parent):
        if (folder / CLASSES).is_file():
            # Not splitlines: it also splits at characters that names can contain.
            text = read_regular_text(folder / CLASSES, RECORDS, errors="surrogateescape")
            names = tuple(line.strip() for line in text.split("\n") if line.strip())
            if len(set(names)) < len(names):
                twice = next(name for i, name in enumerate(names) if name in names[:i])
                raise DataError(
                    f"{folder / CLASSES} lists {twice} twice; expected a different name for each"
                    " class"
                )
            return names
    return None


def relabel(images: AnyImages, classes: tuple[str, ...]) -> AnyImages:
    """Return the images with labels that are positions in `classes`. Raises `DataError` if a class
    is not in `classes`."""
    own = images.classes
    named = images.source.title
    if own == classes:
        return images
    if images.numbered:
        if len(own) > len(classes):
            raise DataError(
                f"{named} has an image of class {len(own) - 1}; training has {len(classes)}"
                " classes, counted from 0"
            )
        return replace(images, classes=classes)
    used = {own[label] for label in np.unique(images.rows["label"]).tolist()}
    unknown = sorted(used - set(classes))
    if unknown:
        raise DataError(
            f"{named} has classes that the training images do not have: {', '.join(unknown[:5])}"
        )
    position = {name: i for i, name in enumerate(classes)}
    rows = np.array(images.rows)
    rows["label"] = np.array([position.get(name, 0) for name in own], np.int32)[rows["label"]]
    return replace(images, rows=rows, classes=classes)
