"""What a source holds, without decoding: place, label and name of every image, in the same order
for all formats."""

import errno
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from lockstep.data.class_folders import (
    CLASS_LIST,
    ClassFolder,
    Skipped,
    list_class_folders,
    read_class_folder,
)
from lockstep.data.class_order import are_numbers, sort_classes
from lockstep.data.images import ROW, Images, Names, Progress, Quarantined, encode_name, relabel
from lockstep.data.sources import ALIASES, CLASSES, FOLDER, LABELS, Source
from lockstep.system.errors import DataError
from lockstep.system.machine import cores
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.data.stored_files import Inspect, StoredFile

_PROGRESS_SEC = 0.2
_IS_NUMBER = re.compile(rb"\d+(?:\.\w+)?")
"""A name that is only the position of the image."""


@dataclass(frozen=True)
class Listing(Images):
    """Every image of a source. The rows do not have height and width, and in an image folder no
    length."""

    damaged: tuple[Quarantined, ...] = ()
    left_out: tuple[Quarantined, ...] = ()
    """The images that a quarantine leaves out."""
    skipped: tuple[Skipped, ...] = ()
    """What is in class folders or files and not an image of a class."""


def list_images(
    source: Source,
    classes: tuple[str, ...] | None = None,
    *,
    first_label: int = 0,
    quarantine: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    inspect: "Inspect | None" = None,
) -> Listing:
    """Return the images of a source, without those whose places are keys of `quarantine`; its
    values are the reasons.

    `first_label` is the number of the first class in files that have numbers as labels. `progress`
    is called with the megabytes listed and the total; it is not called for an image folder, nor is
    `inspect`.

    Labels are positions in `classes`, or in the source's own list. The images of a data set have
    the same order in every format:

    - RecordIO: by the number from im2rec.
    - Other formats: by class and name, or only by name if all names are numbers. Classes whose
      names are all numbers sort as numbers.
    - If numbers or names are missing or not unique: as stored.

    In a folder, only `folder/class/image` is listed. A class folder without images is no class;
    what else is left out is in `Listing.skipped`. Raises `DataError` if a class is not in
    `classes`.
    """
    quarantine = quarantine or {}
    if source.format == FOLDER:
        listing = _list_folder(source, quarantine)
    else:
        listing = _list_files(source, first_label, quarantine, progress, inspect)
    if classes is None:
        return listing
    moved = relabel(listing, classes)
    order = order_as_listed(moved, listing.classes)
    if order is None:
        return moved
    return replace(moved, rows=moved.rows[order], names=Names.of(moved.names[i] for i in order))


def order_as_listed(
    images: Images, before: Sequence[str], *, is_first: bool = False
) -> np.ndarray | None:
    """Return the order in which images with new labels are listed; None if they are in it.

    `before` are the names of the classes in the order of their old labels. Labels of other images,
    whose classes are not numbers, leave the order as it is, unless `is_first`; so do all labels in
    RecordIO, where images have numbers.
    """
    is_same = images.numbered or not (is_first or are_numbers(before))
    if is_same or images.classes == tuple(before) or images.source.format == "recordio":
        return None
    return _order(np.zeros(0, np.int64), images.rows, list(images.names))


def _list_folder(source: Source, quarantine: Mapping[str, str]) -> Listing:
    folders = list_class_folders(source.root)
    contents = {name: read_class_folder(source.root, name) for name in folders}
    folders = [name for name in folders if contents[name].files]
    skipped = list(chain.from_iterable(folder.skipped for folder in contents.values()))
    classes = _order_folders(source, folders, skipped)
    labels_by_class = {name: label for label, name in enumerate(classes)}
    names = []
    labels = []
    left_out = []
    damaged = []
    for folder in sorted(folders, key=labels_by_class.__getitem__):
        for file in contents[folder].files:
            name = f"{folder}/{file}"
            if name in quarantine:
                left_out.append(Quarantined(name, quarantine[name]))
            elif file in contents[folder].looping:
                damaged.append(Quarantined(name, os.strerror(errno.ELOOP)))
            else:
                names.append(encode_name(name))
                labels.append(labels_by_class[folder])
    rows = np.zeros(len(names), ROW)
    rows["label"] = labels
    if source.files:
        _place_objects(source, rows, names, contents)
    return Listing(
        source,
        rows,
        Names.of(names),
        classes,
        numbered=False,
        damaged=tuple(damaged),
        left_out=tuple(left_out),
        skipped=tuple(skipped),
    )


def _order_folders(
    source: Source, folders: Sequence[str], skipped: list[Skipped]
) -> tuple[str, ...]:
    """Return the classes of class folders in the order of their list, or sorted without one. Add a
    list that lacks a folder to `skipped`."""
    classes = read_classes(source) or ()
    unlisted = sorted(set(folders) - set(classes))
    if classes and unlisted:
        skipped.append(Skipped(CLASS_LIST, f"{CLASSES} without {unlisted[0]}"))
    return sort_classes(folders) if unlisted else classes


def _place_objects(
    source: Source, rows: np.ndarray, names: list[bytes], contents: Mapping[str, ClassFolder]
) -> None:
    """Fill in where images that are objects of a store are in the bundles of their folders."""
    numbers = {file.partition("/")[0]: number for number, file in enumerate(source.files)}
    for row, name in zip(rows, names, strict=True):
        folder, _, file = os.fsdecode(name).partition("/")
        if folder not in numbers:
            from lockstep.data.stores.bundles import explain_new_list

            raise explain_new_list(source.root / folder)
        row["file"] = numbers[folder]
        row["offset"], row["length"] = contents[folder].places[file]


def _list_files(
    source: Source,
    first_label: int,
    quarantine: Mapping[str, str],
    progress: Progress | None,
    inspect: "Inspect | None",
) -> Listing:
    from lockstep.data.stored_files import add_name, name_classes

    files = _read_files(source, first_label, quarantine, progress, inspect)
    name_classes(source, files)
    skipped: list[Skipped] = []
    names_of_folders = sorted({name for file in files for name in file.folders})
    folders = _order_folders(source, names_of_folders, skipped) if names_of_folders else ()
    positions = {name: position for position, name in enumerate(folders)}
    parts = [np.zeros(0, ROW)]
    numbers = [np.zeros(0, np.int64)]
    names: list[bytes] = []
    class_names: dict[int, str] = {}
    damaged: list[Quarantined] = []
    left_out: list[Quarantined] = []
    for file in files:
        parts += file.list_rows(positions)
        numbers += file.numbers
        names += file.names
        for label, name in file.class_names.items():
            add_name(class_names, label, name)
        damaged += file.damaged
        left_out += file.left_out
        skipped += file.tally.entries()
        if folders and any((part["label"] >= 0).any() for part in file.rows):
            raise DataError(
                f"{source.title}: some images have a number as their class, others a folder;"
                " expected one of them"
            )
    rows = np.concatenate(parts)
    classes = folders or _name_classes(source, rows["label"], class_names)
    order = _order(np.concatenate(numbers), rows, names)
    return Listing(
        source,
        rows[order],
        Names.of(names[i] for i in order.tolist()),
        classes or tuple(map(str, range(int(rows["label"].max(initial=-1)) + 1))),
        numbered=classes is None,
        damaged=tuple(damaged),
        left_out=tuple(left_out),
        skipped=tuple(skipped),
    )


def _read_files(
    source: Source,
    first_label: int,
    quarantine: Mapping[str, str],
    progress: Progress | None,
    inspect: "Inspect | None",
) -> "list[StoredFile]":
    from lockstep.data.stored_files import list_file

    read = [0] * len(source.files)
    stopped = Event()
    total = sum((source.root / path).stat().st_size for path in source.files)
    # An interruption sets `stopped`; the threads then end at their next images.
    with ThreadPoolExecutor(cores()) as pool:
        work = [
            pool.submit(list_file, source, i, first_label, quarantine, inspect, read, stopped)
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
        return [task.result() for task in work]


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


def _name_classes(
    source: Source, labels: np.ndarray, class_names: dict[int, str]
) -> tuple[str, ...] | None:
    """Return the names of the classes; None if their names are only their numbers."""
    path = _find_class_list(source)
    count = int(labels.max()) + 1 if len(labels) else 0
    if path is not None:
        classes = _parse_classes(path)
        if count > len(classes):
            raise DataError(
                f"{source.title} has an image of class {count - 1}, but {path.name} next to it"
                f" lists {format_count(len(classes), 'class')}, counted from 0. Complete the list."
                " If the labels start at 1, write the images again with: lockstep data pack"
                " --first-label 1"
            )
        return classes
    names = [class_names.get(label) or str(label) for label in range(count)]
    is_named = any(class_names.values()) and len(set(names)) == count
    return tuple(names) if is_named else None


def read_classes(source: Source) -> tuple[str, ...] | None:
    """Return the names in `classes.txt` in a source's folder, or in the folder above a folder
    `train` or `val`, or next to TFRecords in the list of TensorFlow Datasets; None if there is no
    such file."""
    path = _find_class_list(source)
    return None if path is None else _parse_classes(path)


def _find_class_list(source: Source) -> Path | None:
    root = source.root.absolute()
    folders = [source.root]
    if root.name.lower() in chain.from_iterable(ALIASES.values()):
        folders.append(root.parent)
    paths = [folder / CLASSES for folder in folders]
    if source.format == "tfrecord":
        paths.append(source.root / LABELS)
    return next((path for path in paths if path.is_file()), None)


def _parse_classes(path: Path) -> tuple[str, ...]:
    from lockstep.data.stored_files import MOST_CLASSES

    text = read_regular_text(path, TEXT, errors="surrogateescape").removeprefix("\ufeff")
    if text.count("\n") > MOST_CLASSES:
        raise DataError(f"{path} lists more than {MOST_CLASSES} classes")
    # Not splitlines: it also splits at characters that names can contain.
    names = tuple(filter(None, map(str.strip, text.split("\n"))))
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise DataError(f"{path} lists {twice} twice; expected a different name for each class")
    return names
