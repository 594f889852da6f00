"""What one file of a source holds that has many images, without decoding them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from threading import Event
from types import MappingProxyType

import numpy as np

from lockstep.data import class_folders
from lockstep.data.class_folders import Skipped, Tally
from lockstep.data.containers import CONTAINERS, NO_LABEL, Damage, Stored, split_path
from lockstep.data.images import ROW, Quarantined, encode_name
from lockstep.data.sources import BEGIN_BYTES, Source, explain_compression
from lockstep.data.stores.places import open_places
from lockstep.data.tar_folders import TarClasses, find_classes_of_tars, list_unused
from lockstep.system.errors import DataError
from lockstep.system.regular_files import IMAGE

MOST_CLASSES = 2**20
NO_FILE = 2**32 - 1
"""The file of rows that were inspected, and left out when all folders of their tar were known."""
MOST_BYTES = IMAGE.most_bytes
"""The maximum size of an image in bytes; a row has room for it."""
Item = Stored | Damage | Skipped
Inspect = Callable[[np.ndarray], None]
"""Called by several threads with some rows of a file when they are listed, to fill in the lengths,
heights and widths."""
_AT_ONCE = 2**10
_MOST_DAMAGED = 100
"""This many damaged places of a file are listed one by one, and more are counted."""


@dataclass
class StoredFile:
    """The contents of one file of a source."""

    rows: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    class_names: dict[int, str] = field(default_factory=dict)
    """The names of classes by label."""
    folders: dict[str, int] = field(default_factory=dict)
    """Temporary labels below 0 for classes that have a name and no number: by the paths of their
    folders while the file is read, then by name."""
    directories: set[str] = field(default_factory=set)
    """The paths of all folders that are members of a tar."""
    damaged: list[Quarantined] = field(default_factory=list)
    left_out: list[Quarantined] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    """What else is left out."""
    reached: int = 0
    """The offset up to which the file is read."""

    def fill(
        self,
        source: Source,
        number: int,
        first_label: int = 0,
        quarantine: Mapping[str, str] = MappingProxyType({}),
        stopped: Event | None = None,
    ) -> Iterator[np.ndarray]:
        """Add what a file of a source holds; yield the rows of some images at a time. Raises as
        `scan_file` does; what was read before is added."""
        path = source.files[number]
        images: list[Stored] = []
        try:
            for item in scan_file(source, path, stopped):
                if isinstance(item, Skipped):
                    self.leave_out(item, path)
                    continue
                if isinstance(item, Damage):
                    begin, self.reached, reason = item.begin, item.end, item.reason
                else:
                    begin = self.reached = item.offset
                    reason = find_fault(item, first_label)
                place = f"{path}@{begin}"
                if place in quarantine:
                    self.left_out.append(Quarantined(place, quarantine[place]))
                elif isinstance(item, Damage) or reason:
                    self.add_damage(place, reason)
                elif item.label == NO_LABEL:
                    images.append(item)
                else:
                    images.append(item._replace(label=item.label - first_label))
                if len(images) == _AT_ONCE:
                    some = images
                    images = []
                    yield self.add_images(some, number)
        finally:
            last = self.add_images(images, number)
        yield last

    def add_damage(self, place: str, reason: str) -> None:
        """Add a place that holds no usable image."""
        if len(self.damaged) < _MOST_DAMAGED:
            self.damaged.append(Quarantined(place, reason))
        else:
            self.tally.add(class_folders.BAD_RECORD, place)

    def leave_out(self, item: Skipped, path: str) -> None:
        """Count a member of a tar. `path` is that of the file in its source."""
        if item.kind == class_folders.EMPTY_CLASS:
            self.directories.add("/".join(split_path(item.place)))
        else:
            self.tally.add(item.kind, f"{path}/{item.place}".removesuffix("/"))

    def add_images(self, images: Sequence[Stored], file: int) -> np.ndarray:
        """Add images of the file of this number; return their rows. A class without a number gets a
        new negative label."""
        rows = np.zeros(len(images), ROW)
        rows["file"] = file
        offsets = []
        lengths = []
        labels = []
        numbers = []
        for image in images:
            offsets.append(~image.offset if image.in_parts else image.offset)
            lengths.append(image.length)
            numbers.append(image.number)
            self.names.append(encode_name(image.name))
            label = image.label
            if label == NO_LABEL:
                label = self.folders.setdefault(image.class_name, -1 - len(self.folders))
            elif image.class_name:
                add_name(self.class_names, label, image.class_name)
            labels.append(label)
        if len(self.folders) > MOST_CLASSES:
            raise ValueError(f"it has more than {MOST_CLASSES} classes")
        rows["offset"] = offsets
        rows["length"] = lengths
        rows["label"] = labels
        self.rows.append(rows)
        self.numbers.append(np.array(numbers, np.int64))
        return rows

    def name_classes(self, path: str, classes: TarClasses, unused: Iterable[str]) -> None:
        """Replace the paths of folders by the names of their classes, and leave out the images of
        folders that are no classes, and `unused` directories. `path` is that of the file in its
        source."""
        labels = np.concatenate([np.zeros(0, np.int32), *(rows["label"] for rows in self.rows)])
        outside = []
        nested = set()
        for folder in sorted(self.folders.keys() - classes.names.keys()):
            outside.append(self.folders[folder])
            nested.add(classes.find_nested(folder))
            if not classes.find_nested(folder):
                for i in np.flatnonzero(labels == outside[-1]).tolist():
                    place = f"{path}/{os.fsdecode(self.names[i])}"
                    self.tally.add(class_folders.LOOSE_IMAGE, place)
        for folder in unused:
            nested.add(classes.find_nested(folder))
            if not classes.find_nested(folder):
                self.tally.add(class_folders.EMPTY_CLASS, f"{path}/{folder}")
        for folder in sorted(nested - {""}):
            self.tally.add(class_folders.NESTED_FOLDER, f"{path}/{folder}")
        if outside:
            self._remove(outside)
        kept = self.folders.keys() & classes.names.keys()
        self.folders = {classes.names[folder]: self.folders[folder] for folder in kept}

    def list_rows(self, positions: Mapping[str, int]) -> list[np.ndarray]:
        """Return the rows, with the positions of classes instead of temporary labels."""
        if not self.folders:
            return self.rows
        own = np.zeros(1 - min(self.folders.values()), np.int32)
        for name, label in self.folders.items():
            own[-label] = positions[name]
        rows = np.concatenate(self.rows)
        labels = rows["label"]
        rows["label"] = np.where(labels < 0, own[np.maximum(-labels, 0)], labels)
        return [rows]

    def _remove(self, labels: list[int]) -> None:
        """Remove the images with these labels."""
        kept = [~np.isin(rows["label"], labels) for rows in self.rows]
        self.names = list(compress(self.names, np.concatenate(kept).tolist()))
        for i, mask in enumerate(kept):
            self.rows[i]["file"][~mask] = NO_FILE  # for who inspected them
            self.rows[i] = self.rows[i][mask]
            self.numbers[i] = self.numbers[i][mask]


def name_classes(source: Source, files: Sequence[StoredFile]) -> None:
    """Decide which folders in the tars of a source are classes, and leave out the others."""
    tars = [file.folders for file in files]
    folders = set(chain.from_iterable(tars))
    known: set[str] = set()
    for path, file, classes in zip(source.files, files, find_classes_of_tars(tars), strict=True):
        if file.folders:
            file.name_classes(path, classes, list_unused(file.directories - known, folders))
            known |= file.directories


def add_name(names: dict[int, str], label: int, name: str) -> None:
    """Add the name of a class to `names`. A class with several names has none: ""."""
    if names.setdefault(label, name) != name:
        names[label] = ""


def scan_file(source: Source, path: str, stopped: Event | None = None) -> Iterator[Item]:
    """Yield what a file of a source holds. Raises `ValueError` if it is compressed, and `Stopped`
    when `stopped` is set."""
    whole = source.root / path
    for item in CONTAINERS[source.format].load().scan_images(whole, stopped):
        if isinstance(item, Damage) and not item.begin:
            reason = explain_compression(
                whole, open_places(whole).read(0, min(item.end, BEGIN_BYTES))
            )
            if reason:
                raise ValueError(reason)
        yield item


def list_file(
    source: Source,
    number: int,
    first_label: int,
    quarantine: Mapping[str, str],
    inspect: Inspect | None,
    read: list[int],
    stopped: Event,
) -> StoredFile:
    """Return the contents of a file. Update `read` with the offset reached; end when `stopped` is
    set."""
    file = StoredFile()
    try:
        for rows in file.fill(source, number, first_label, quarantine, stopped):
            read[number] = file.reached
            if inspect is not None:
                inspect(rows)
    except ValueError as error:
        raise DataError(f"{source.root / source.files[number]}: {error}") from None
    return file


def find_fault(item: Stored, first_label: int = 0) -> str:
    """Return why a stored image cannot be listed; "" if it can."""
    if item.length > MOST_BYTES:
        return f"{item.length} bytes are too many"
    if item.label == NO_LABEL or 0 <= item.label - first_label <= MOST_CLASSES:
        return ""
    return f"its label is {item.label}"
