"""Read the samples of tables and lists: the columns of images, labels and splits are chosen, and
everything is checked before an image is written."""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.class_order import sort_classes
from lockstep.data.forms import Form, is_usual, name_split
from lockstep.data.packing.stream import Row, number_label, read_label
from lockstep.data.packing.target import list_states
from lockstep.data.sources import shorten_list
from lockstep.system.errors import DataError, nearest

_ENDINGS = ("", ".JPEG", ".jpg", ".jpeg", ".png")
"""What a list may leave out at the end of a path. ImageNet's lists do."""


class Columns(NamedTuple):
    """How the user reads a table or a list."""

    image: str = ""
    """The column of images; empty: the only one that may be."""
    label: str = ""
    """The column of labels; empty: the only one that may be."""
    images: Path | None = None
    """The folder in which the images are that it names by paths; None: its own."""


class Table(NamedTuple):
    """A file of rows."""

    path: Path
    names: Sequence[str]
    """Its columns."""
    images: Sequence[str]
    """Those that hold images or their paths by their types; all if there are no types."""
    labels: Sequence[str]
    """Those that hold labels by their types."""
    paths: Sequence[str]
    """Those that hold texts."""
    classes: Mapping[str, Sequence[str]]
    """The names that the numbers of columns stand for."""
    read: Callable[[Sequence[str]], Iterator[tuple[str, Mapping[str, Any]]]]
    """Yields the place of each row and its values of some columns."""


class _Chosen(NamedTuple):
    """A table with its columns."""

    table: Table
    split: str
    """The split of its rows, if no column has it."""
    image: str
    label: str
    column: str | None
    """The column of splits."""
    folder: Path

    def find_split(self, place: str, row: Mapping[str, Any]) -> str:
        return read_split(row[self.column], place) if self.column else self.split

    def find_image(self, place: str, image: Any) -> Any:
        """Return the bytes, the path or the array of an image."""
        if isinstance(image, Mapping):
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        if isinstance(image, str) and image.strip():
            return _find_file(self.folder, image.strip(), place)
        if isinstance(image, list):
            try:
                return np.array(image, np.uint8)
            except (TypeError, ValueError, OverflowError):
                image = None
        if isinstance(image, bytes):
            return image
        raise DataError(f"{place} has no image in its column {self.image}. Leave it out")


class Samples(NamedTuple):
    """The samples of a data set."""

    about: str
    """The same text for the same samples."""
    states: np.ndarray
    """Size and modification time of every file: int64 [files, 2]."""
    total: int
    classes: Sequence[str]
    rows: Iterator[Row]


def read_samples(form: Form, tables: Iterable[tuple[str, Table]], columns: Columns) -> Samples:
    """Return the samples of tables with their splits.

    Raises `DataError` if one is damaged, if its columns can be understood in two ways, if a label
    is missing or not one of the classes, or if an image is missing, elsewhere or listed twice.
    """
    chosen = []
    for split, table in tables:
        item = _choose(table, split, columns)
        if _has_labels(item):
            chosen.append(item)
    if not chosen:
        raise DataError(f"{form.path} has no labels; expected a class for each image")
    listed = {tuple(item.table.classes.get(item.label, ())) for item in chosen}
    if len(listed) > 1:
        raise DataError(f"{form.path}: its files list different classes. Pack them one by one")
    classes: Sequence[str] = listed.pop()
    places: dict[Path, str] = {}
    labels: set[str | int] = set()
    total = 0
    for item in chosen:
        total += _check_rows(item, classes, labels, places)
    if not total:
        raise DataError(f"{form.path} has no rows")
    is_named = bool(classes)
    classes = classes or sort_classes(sorted(map(str, labels)))
    positions = dict(zip(classes, range(len(classes)), strict=True))

    def rows() -> Iterator[Row]:
        for item in chosen:
            for place, row in item.table.read(_list_columns(item)):
                label = read_label(row[item.label])
                number = number_label(label if is_named else str(label), positions)
                image = item.find_image(place, row[item.image])
                yield Row(item.find_split(place, row), number, image, place)

    about = [str(form.path.absolute()), *map(str, columns), classes]
    states = list_states(map(str, (*form.files, *places)))
    return Samples(json.dumps(about), states, total, classes, rows())


def _choose(table: Table, split: str, columns: Columns) -> _Chosen:
    column = None
    for name in table.names:
        if is_usual("split", name):
            column = name
    image = _choose_column(table, "image", columns.image, table.images)
    labels = [name for name in table.labels if name in table.classes]
    if not labels:
        labels = [name for name in table.labels if name != image and not is_usual("other", name)]
    label = _choose_column(table, "label", columns.label, labels)
    return _Chosen(table, split, image, label, column, columns.images or table.path.parent)


def _has_labels(item: _Chosen) -> bool:
    """Return whether a table has labels. Of many public sets the split `test` has none."""
    _, row = next(item.table.read([item.label]), ("", {}))
    return item.split != "test" or row.get(item.label) not in (None, -1)


def _choose_column(table: Table, kind: str, wanted: str, possible: Sequence[str]) -> str:
    """Return the column of a kind: `wanted`, else the only possible one, or the only one of them
    with a usual name."""
    names = list(table.names)
    if wanted:
        if wanted in names:
            return wanted
        raise DataError(f"{table.path} has no column {wanted}. {nearest(wanted, names)}")
    usual = [name for name in possible if is_usual(kind, name)]
    possible = usual or possible
    if len(possible) == 1:
        return possible[0]
    what = "no column that seems to hold"
    if possible:
        names = list(possible)
        what = f"{len(names)} columns that may hold"
    raise DataError(
        f"{table.path} has {what} the {kind}: {shorten_list(names, 10)}. Choose one: --{kind}"
        f" {shlex.quote(names[0])}"
    )


def _list_columns(item: _Chosen) -> list[str]:
    return [item.image, item.label, *filter(None, [item.column])]


def _check_rows(
    item: _Chosen, classes: Sequence[str], labels: set[str | int], places: dict[Path, str]
) -> int:
    """Check the rows of a table, and return their number. Labels are added to `labels`, and images
    that are files to `places`."""
    positions = dict(zip(classes, range(len(classes)), strict=True))
    has_paths = item.image in item.table.paths
    count = 0
    missing: list[Path] = []
    for place, row in item.table.read(_list_columns(item)[not has_paths :]):
        count += 1
        try:
            label = read_label(row[item.label])
            if classes:
                number_label(label, positions)
            elif isinstance(label, int) and label < 0:
                raise ValueError(f"the label is {label}; expected at least 0")
        except ValueError as error:
            raise DataError(
                f"{place}: {error}. Leave it out, or name another column: --label NAME"
            ) from None
        labels.add(label)
        item.find_split(place, row)
        if has_paths:
            path = item.find_image(place, row[item.image])
            if path in places:
                raise DataError(
                    f"{place} lists the image of {places[path]} again: {path}; expected each image"
                    " once. Remove one of the two"
                )
            places[path] = place
            if not path.is_file():
                missing.append(path)
    if missing:
        raise DataError(
            f"{item.table.path}: {len(missing)} of {count} images are missing; the first is"
            f" {missing[0]}. If they are in another folder, name it: --images FOLDER"
        )
    return count


def read_split(word: Any, place: str) -> str:
    """Return the split that a word names. Raises `DataError` if it names none."""
    split = name_split(str(word))
    if split is None:
        raise DataError(
            f"{place}: {word!r:.100} is not a split; expected train, val, validation or test"
        )
    return split


def _find_file(folder: Path, name: str, place: str) -> Path:
    """Return the path of an image. Raises `DataError` if it leads out of `folder`: the list of a
    stranger must not read other files."""
    folder = folder.absolute()
    path = Path(os.path.normpath(folder / name))
    if not path.is_relative_to(os.path.normpath(folder)) or "\0" in name:
        raise DataError(
            f"{place}: {name!r:.200} leads out of {folder}. If you trust the list, name a folder"
            " around its images: --images FOLDER"
        )
    for ending in _ENDINGS:
        whole = path.with_name(path.name + ending)
        if whole.is_file():
            return whole
    return path
