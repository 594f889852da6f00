"""Read the samples of tables and lists: the columns of images, labels and splits are chosen, and
everything is checked before an image is written."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.class_order import sort_classes
from lockstep.data.forms import Form, is_usual, name_split
from lockstep.data.images import Progress, add_up
from lockstep.data.packing.stream import LeftOut, Row, number_label, read_label, write_rows
from lockstep.data.packing.target import list_states, lock_target
from lockstep.data.sources import shorten_list
from lockstep.system.errors import DataError, nearest
from lockstep.system.strict_json import to_json
from lockstep.system.text import format_count

_ENDINGS = ("", ".JPEG", ".jpg", ".jpeg", ".png")
"""The ending of a path that a list may leave out, as ImageNet's lists do."""
_PATH = re.compile("file|path|image|img|photo", re.IGNORECASE)
_SEVERAL = "Several labels of an image are not supported"
_NO_LABELS = (None, "", "-1", -1)
"""Labels that mean "none". In many public data sets, the split `test` has only these."""


class Columns(NamedTuple):
    """How the user reads a table or a list."""

    image: str = ""
    """The column of images; empty: the only possible one."""
    label: str = ""
    """The column of labels; empty: the only possible one."""
    images: Path | None = None
    """The folder of images that it names by paths; None: the folder that it is in."""


class Table(NamedTuple):
    """A file of rows."""

    path: Path
    split: str
    """The split of all rows, unless a column has it; empty if there are no splits."""
    kinds: Mapping[str, str]
    """By the name of each column, what its type may hold: `image`, `array`, `text`, `number`, or
    `cell` if there are no types; empty for other types."""
    classes: Mapping[str, Sequence[str]]
    """The names behind the numbers in columns."""
    read: Callable[[Sequence[str]], Iterator[tuple[str, Mapping[str, Any]]]]
    """Yields the place of each row and its values of some columns."""

    def list_columns(self, *kinds: str) -> list[str]:
        """Return the names of columns of some kinds."""
        return [name for name, kind in self.kinds.items() if kind in kinds]


class _Chosen(NamedTuple):
    """A table with its columns."""

    table: Table
    image: str
    label: str
    """Empty if a split `test` has no labels."""
    column: str
    """The column of splits; empty if there is none."""
    folder: Path
    """The folder of images that are named by paths."""

    def read(self, positions: Mapping[str, int] | None, image: str) -> Iterator[Row]:
        """Yield rows with the class of each label by the positions of names; without positions the
        label as a name. An image of a split `test` without a label gets None. `image` is the column
        of images; if it is empty, they are not read. Raises `DataError`."""
        for place, row in self.table.read([*filter(None, (image, self.label, self.column))]):
            split = self.table.split
            if self.column:
                split = read_split(row.get(self.column), place)
            label = row.get(self.label)
            if split == "test" and label in _NO_LABELS:
                yield Row(split, None, None, place)
                continue
            try:
                label = read_label(label)
                if self.label not in self.table.classes:
                    label = str(label)
                if positions is not None:
                    number = number_label(label, positions)
                    if isinstance(label, int):  # files may list the classes in different orders
                        number = positions[self.table.classes[self.label][number]]
                    label = number
            except ValueError as error:
                raise DataError(f"{place}: {error}. {self._advise(label)}") from None
            yield Row(split, label, image and _find_image(self, place, row), place)

    def _advise(self, label: Any) -> str:
        """Return what to do about a label that is missing, a list or wrong."""
        if isinstance(label, list | tuple | Mapping):
            return f"{_SEVERAL}: name another column: --label NAME"
        if label not in _NO_LABELS or self.table.kinds[self.label] == "cell":
            return "Remove its row, or name another column: --label NAME"
        rows = f"dataset.filter(lambda row: row[{self.label!r}] != {label!r})"
        return f"Leave out all such rows with the package datasets: {rows}"


def write_tables(
    form: Form,
    tables: Iterable[Table],
    columns: Columns,
    target: Path,
    progress: Progress | None,
    left_out: LeftOut,
    note: Callable[[str], None],
) -> dict[str, int]:
    """Write the samples of tables with their splits; return counts of images by split. `note` is
    called with a line on images of a split `test` that have no label.

    Raises `DataError` before anything is written if a table is damaged, if its columns can be
    understood in two ways, if a label is missing or not one of the classes, or if an image is
    missing, elsewhere or listed twice.
    """
    chosen = [_choose(table, columns) for table in tables]
    lists: dict[Sequence[str], Path] = {}
    for item in chosen:
        if item.label:
            lists.setdefault(tuple(item.table.classes.get(item.label, ())), item.table.path)
    classes: Sequence[str] = next(iter(lists), ())
    files = " and ".join(map(str, lists.values()))
    different = sorted(set(chain(*lists)) - set(classes).intersection(*lists))
    if different:
        raise DataError(
            f"{files} list different classes: {shorten_list(different, 10)}. Give all files one"
            " ClassLabel, or pack each to a separate folder"
        )
    if len(lists) > 1:
        note(f"note: {files} number their classes differently, and are matched by name")
    positions = {name: i for i, name in enumerate(classes)}
    labels = Counter[Any]()
    places: dict[Path, str] = {}
    for item in chosen:
        _check_rows(item, positions or None, labels, places)
    unlabelled = labels.pop(None, 0)
    if not labels:
        raise DataError(f"{form.path} has no labels in {format_count(unlabelled, 'row')}")
    if unlabelled:
        note(
            f"note: left out {format_count(unlabelled, 'image')} of the split test without a label"
        )
    if not classes:
        classes = sort_classes(sorted(labels))
        positions = {name: i for i, name in enumerate(classes)}
    rows = chain.from_iterable(item.read(positions, item.image) for item in chosen)
    about = to_json([str(form.path.absolute()), *map(str, columns), classes])
    states = list_states(map(str, (*form.files, *places)))
    advance = add_up(progress, labels.total())
    with lock_target(target, about, states):
        return write_rows(rows, target, classes, advance, left_out)


def _choose(table: Table, columns: Columns) -> _Chosen:
    named = filter(partial(is_usual, "image"), table.list_columns("text", "array", "cell"))
    images = table.list_columns("image") or list(named) or table.list_columns("cell")
    image = _choose_column(table, "image", columns.image, images)
    other = [image, *filter(partial(is_usual, "other"), table.kinds)]
    numbered = table.list_columns("text", "number", "cell")
    labels = list(table.classes) or [name for name in numbered if name not in other]
    label = ""
    if labels or columns.label or table.split != "test":
        lists = filter(partial(is_usual, "label"), table.list_columns("array"))
        likely = columns.label or ("" if labels else next(lists, ""))
        if table.kinds.get(likely) in ("array", "image"):
            raise DataError(
                f"{table.path}: the column {likely} does not hold one name or number per image."
                f" {_SEVERAL}: name another column: --label NAME"
            )
        label = _choose_column(table, "label", columns.label, labels)
    column = next(filter(partial(is_usual, "split"), table.kinds), "")
    return _Chosen(table, image, label, column, columns.images or table.path.parent)


def _choose_column(table: Table, kind: str, wanted: str, possible: Sequence[str]) -> str:
    """Return the column of a kind: `wanted`, or the only possible one, if need be by its name."""
    names = list(table.kinds)
    if wanted and wanted in names:  # the index of pandas has no name
        return wanted
    if wanted:
        raise DataError(f"{table.path} has no column {wanted}. {nearest(wanted, names)}")
    possible = list(filter(partial(is_usual, kind), possible)) or possible
    if len(possible) == 1:
        return possible[0]
    if not possible:
        raise DataError(
            f"{table.path} has no column that seems to hold the {kind}: {shorten_list(names, 10)}."
            f" Name it: --{kind} NAME"
        )
    # Of `id` and `file_name`, the second is a path.
    likely = [name for name in possible if kind == "label" or _PATH.search(name)]
    raise DataError(
        f"{table.path} has {len(possible)} columns that may hold the {kind}:"
        f" {shorten_list(list(possible), 10)}. Choose one: --{kind}"
        f" {shlex.quote((likely or possible)[0])}"
    )


def _check_rows(
    item: _Chosen,
    positions: Mapping[str, int] | None,
    labels: Counter[Any],
    places: dict[Path, str],
) -> None:
    """Check the rows of a table, count their labels, and add images that are files to `places`."""
    paths = item.table.list_columns("text", "cell")
    missing: list[Path] = []
    count = 0
    for _, label, path, place in item.read(positions, item.image * (item.image in paths)):
        labels[label] += 1
        if path:
            count += 1
            if path in places:
                raise DataError(
                    f"{place} lists the image of {places[path]} again: {path}; remove it"
                )
            places[path] = place
            if not path.is_file():
                missing.append(path)
    if missing:
        raise DataError(
            f"{item.table.path}: {len(missing)} of {count} images are missing; the first is"
            f" {missing[0]}. If they are in a different folder, name it: --images FOLDER"
        )


def read_split(word: Any, place: str) -> str:
    """Return the split that a word names. Raises `DataError` for any other word."""
    split = name_split(str(word))
    if split is None:
        raise DataError(f"{place}: {word!r:.100} is not a split; expected train, val or test")
    return split


def _find_image(item: _Chosen, place: str, row: Mapping[str, Any]) -> Any:
    """Return the bytes, the path or the array of an image."""
    image = row.get(item.image)
    if isinstance(image, Mapping):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, str) and image.strip():
        return _find_file(item.folder, image.strip(), place)
    if isinstance(image, list):
        with suppress(TypeError, ValueError, OverflowError):
            return np.array(image, np.uint8)
    if isinstance(image, bytes):
        return image
    raise DataError(f"{place} has no image in its column {item.image}. Leave it out")


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
