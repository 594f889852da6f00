"""The training and validation images of a run: those of a data set with both, or a share of its
images held out.

An image is held out for validation if the hash of its class and name is within the share of all
hashes. It stays on its side when other images are added. Every class keeps an image on both
sides: if the hashes leave none for validation, the image with the smallest hash is taken; if they
leave none for training, the one with the largest. The only image of a class is for training.
"""

import hashlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.data import class_folders
from lockstep.data.class_folders import HIDDEN, NEIGHBOUR, Skipped, describe_skipped
from lockstep.data.class_order import AS_INDEXED, sort_classes
from lockstep.data.images import Images, Progress, are_numbers_of, printable
from lockstep.data.index import (
    Index,
    check_layouts,
    find_index,
    list_skipped,
    open_index,
    relabel_index,
    subset,
)
from lockstep.data.sources import (
    ALIASES,
    FOLDER,
    Source,
    find_source,
    find_split,
    find_url,
    holds_split,
    list_unread,
    name_data,
    name_folder,
)
from lockstep.recipes.folds import Fold
from lockstep.system.errors import DataError
from lockstep.system.text import format_count

TYPICAL_SHARE = 0.1
"""The share that messages suggest for many images."""
DEFAULT_SHARE = 0.3
"""The share that a run holds out if a data set has no validation images and nothing sets it."""
_OTHER_WORDS = ("valid", "validate", "dev", "eval")
"""Names of folders that probably hold validation images, and that are not read."""
UNREAD = "-"
"""Stands for the digest of validation images that were not read."""


class Sets(NamedTuple):
    """The images of a run."""

    training: Index
    validation: Index
    data: Path
    """The data set's folder."""
    notes: list[str]
    """Messages about arguments that are read differently than written."""

    @property
    def name(self) -> str:
        """The data set's absolute path, or its URL in an object store."""
        return name_data(self.data)

    @property
    def digest(self) -> str:
        """A text that identifies the images: the digests of both indices, with `UNREAD` for
        validation images that were not read."""
        validation = self.validation.digest if len(self.validation) else UNREAD
        return f"{self.training.digest} {validation}"


def same_images(digest: str, other: str) -> bool:
    """Return whether two digests of sets are of the same images. Validation images that were not
    read can be any.

    >>> same_images("a b", "a -"), same_images("a b", "a c"), same_images("a b", "x -")
    (True, False, False)
    """
    training, _, validation = digest.partition(" ")
    others, _, other_validation = other.partition(" ")
    return training == others and (
        validation == other_validation or UNREAD in (validation, other_validation)
    )


def open_sets(
    data: Path,
    division: float | Fold,
    progress: Callable[[str], Progress],
    *,
    validates: bool = True,
    is_strict: bool = False,
    class_order: str = AS_INDEXED,
    own_classes: tuple[str, ...] = (),
) -> Sets:
    """Return the training and validation images of a data set, or of one split of it that is given
    in its place.

    `division` is a share that is held out from the training images, or from all images of a folder
    of classes, or a fold of them; 0: nothing. `progress` takes the name of a task and returns the
    function to call with its progress.
    Without `validates`, validation images are not read: their index is empty, and a folder of
    classes has only training images. With `is_strict`, class folders that are empty or hold folders
    are refused; otherwise they are left out, and a note counts them. Classes have the order
    `class_order`, or that of `own_classes`, those of the run so far. Raises `DataError` if there
    are no validation images, or if there are and a share is requested.
    """
    data, sources, notes = find_run_sources(data, division, validates=validates)
    if is_strict:
        check_layouts(sources)
    if division:
        whole = open_index(sources[0], progress=progress("indexing"))
        whole = arrange_classes(whole, class_order, own_classes)
        return Sets(*divide_index(whole, division), data, notes + note_skipped(data, [whole]))
    training = open_index(sources[0], progress=progress("indexing train"))
    training = arrange_classes(training, class_order, own_classes)
    if not validates:
        nothing = replace(subset(training, np.zeros(0, np.int64)), quarantined=())
        return Sets(training, nothing, data, notes + note_skipped(data, [training]))
    validation = open_index(sources[1], classes=training.classes, progress=progress("indexing val"))
    notes += note_skipped(data, [training, validation])
    if validation.numbered and not training.numbered:
        notes.append("labels of validation images are matched by number: they have no class names")
    return Sets(training, validation, data, notes)


def arrange_classes(index: Index, class_order: str, own_classes: tuple[str, ...] = ()) -> Index:
    """Return the index with its classes in an order of `class_order`, or as in `own_classes` if
    these have all of its classes, or are their numbers."""
    if index.numbered:
        is_known = len(index.classes) <= len(own_classes)
        return relabel_index(index, own_classes) if is_known else index
    if set(index.classes) <= set(own_classes) or are_numbers_of(index, own_classes):
        return relabel_index(index, own_classes, is_first=True)
    return relabel_index(index, sort_classes(index.classes, class_order))


class RunSources(NamedTuple):
    """Where the images of a run are."""

    data: Path
    """The data set's folder."""
    sources: list[Source]
    """The training images and, if they are read, the validation images; or all, of which a share is
    held out."""
    notes: list[str]
    """Messages about arguments that are read differently than written."""


def _find_folder(data: Path) -> Path:
    """Return the folder of a data set, which may be in a store that few runs read."""
    if find_url(data) is None:
        return data
    from lockstep.data.stores.mirror import find_folder

    return find_folder(data)


def find_run_sources(data: Path, division: float | Fold, *, validates: bool = True) -> RunSources:
    """Return where the images are that `open_sets` opens. Raises the same errors, before an image
    is read."""
    data = _find_folder(data)
    if division:
        notes = []
        if isinstance(division, Fold) and holds_split(data, "val"):
            notes.append(
                f"the validation images of {data} are not used: folds validate on training images"
            )
        return RunSources(data, [whole_source(data, division)], notes)
    notes = []
    whole_set = _find_whole_set(data)
    if whole_set is not None:
        whole = shlex.quote(str(whole_set))
        notes = [f"{data} is part of {whole_set}; the run uses the whole: --data {whole}"]
        data = whole_set
    if validates:
        return RunSources(data, [_require_split(data, split) for split in ALIASES], notes)
    if not holds_split(data, "train") and _holds_classes(data):
        return RunSources(data, [find_source(data)], notes)
    return RunSources(data, [find_split(data, "train")], notes)


def note_skipped(data: Path, indexes: Sequence[Index]) -> list[str]:
    """Return notes on stored indexes that were not used, and one that counts what is left out of
    the folders of a data set, if anything but hidden files is."""
    skipped: list[Skipped] = []
    notes: list[str] = []
    for index in indexes:
        notes += index.notes
        split = "" if index.root == data else f"{index.root.name}/"
        items = list_skipped(index)
        skipped += [item._replace(place=split + printable(item.place)) for item in items]
        skipped += [Skipped(NEIGHBOUR, printable(name)) for name in list_unread(data, index.source)]
    if all(item.kind == HIDDEN for item in skipped):  # as file managers write them
        return notes
    name = name_folder(data)
    note = f"left out of {name}: {describe_skipped(skipped)}"
    if name == str(data):
        note += f"; lockstep data check {shlex.quote(name)} lists all"
    return [*notes, note]


def choose_share(data: Path) -> float:
    """Return the share of a data set that a run holds out for validation by default: 0 if it has
    validation images, or no images of which a share can be held out."""
    data = _find_folder(data)
    if not data.is_dir() or holds_split(data, "val") or _find_whole_set(data) is not None:
        return 0.0
    if holds_split(data, "train"):
        return 0.0 if _find_other_word(data) else DEFAULT_SHARE
    try:
        holds_files = find_source(data).format != FOLDER
    except DataError:
        return 0.0
    return DEFAULT_SHARE if holds_files or _holds_classes(data) else 0.0


def _find_other_word(data: Path) -> str:
    """Return the name of a folder next to the training images that probably holds validation
    images; "" if there is none."""
    for name in _OTHER_WORDS:
        if (data / name).is_dir():
            return name
    return ""


def _require_split(data: Path, split: str) -> Source:
    """Return the source of a split. The error of a data set without validation images suggests
    holding out a share."""
    try:
        return find_split(data, split)
    except DataError as error:
        if not data.is_dir() or holds_split(data, "val"):
            raise
        if holds_split(data, "train"):
            where = "the training images"
            other = _find_other_word(data)
            if other:
                raise DataError(
                    f"{error}. If {data / other} holds them, rename it to {data / split}; to hold"
                    f" out a share of {where}, use --split {DEFAULT_SHARE}"
                ) from None
        elif _holds_classes(data):
            where = f"the classes in {data}"
        else:
            raise
        raise DataError(
            f"{error}. To hold out a share of {where} for validation, use --split {TYPICAL_SHARE},"
            " or 0.3 with fewer than about 500 images"
        ) from None


def _holds_classes(data: Path) -> bool:
    from lockstep.data.forms import find_form

    try:
        return bool(class_folders.list_class_folders(data)) and find_form(data) is None
    except DataError:
        return False


def _find_whole_set(data: Path) -> Path | None:
    """Return the data set if `data` is only its training or validation images, such as DATA/train;
    otherwise None."""
    parent = data.parent if data.name else data.absolute().parent
    name = data.absolute().name.lower()
    is_named = any(name in aliases for aliases in ALIASES.values())
    if not is_named or holds_split(data, "train"):
        return None
    return parent if all(holds_split(parent, split) for split in ALIASES) else None


def whole_source(data: Path, division: float | Fold) -> Source:
    """Return the source of which a share or a fold is held out: the training images, or all images
    of a folder of classes.

    Raises `DataError` if the data set has validation images and a share is held out.
    """
    if not isinstance(division, Fold) and holds_split(data, "val"):
        raise DataError(
            f"{data} has validation images, which --split does not allow: leave out --split, or use"
            f" --data {shlex.quote(str(data / ALIASES['train'][0]))} to hold out a share of the"
            " training images"
        )
    return find_split(data, "train") if holds_split(data, "train") else find_source(data)


def find_validation_index(
    data: Path, division: float | Fold, classes: tuple[str, ...]
) -> Index | None:
    """Return the index of a run's validation images, or None if no index fits; see
    `lockstep.data.index.find_index`."""
    data = _find_folder(data)
    if not division:
        return find_index(find_split(data, "val"), classes=classes)
    whole = find_index(whole_source(data, division), classes=classes)
    return whole if whole is None else divide_index(whole, division)[1]


def divide_index(index: Index, division: float | Fold) -> tuple[Index, Index]:
    """Return the training and the validation images of an index, both in the order of the index.

    Raises `DataError` if images have no names, if no image is left for validation, or if there are
    fewer images than folds.
    """
    if isinstance(division, Fold):
        if len(index) < division.count:
            raise DataError(
                f"{index.source.title} has {format_count(len(index), 'image')}, too few for"
                f" {division.count} folds"
            )
        held = assign_folds(index, division) == division.number
    else:
        held = hold_out(index, division)
    if not held.any():
        raise DataError(
            f"{index.source.title} has {format_count(len(index), 'image')} of"
            f" {format_count(len(index.classes), 'class')}, one of each class: none can be"
            " held out for validation; add images"
        )
    training = subset(index, np.flatnonzero(~held))
    validation = subset(index, np.flatnonzero(held))
    return training, replace(validation, quarantined=(), skipped=())


def hold_out(index: Images, share: float) -> np.ndarray:
    """Return which images are for validation: bool [images]. Raises `DataError` if images have no
    names."""
    labels = index.rows["label"].astype(np.int64)
    places = _hash_names(index, labels)
    order = np.lexsort((places, labels))  # the images of each class together, by rising hash
    counts = np.bincount(labels, minlength=len(index.classes))
    below = np.bincount(labels[places < share], minlength=len(index.classes))
    held = np.minimum(np.maximum(below, 1), np.maximum(counts - 1, 0))
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels[order]]
    chosen = np.zeros(len(labels), bool)
    chosen[order] = rank < held[labels[order]]
    return chosen


def assign_folds(index: Index, fold: Fold) -> np.ndarray:
    """Return the number of the fold in which each image is for validation: int64 [images], from 1.

    The images of each class, in the order of their hashes, are dealt to the folds in turn, and the
    next class continues where the last one ended: folds differ by at most one image in size, and by
    at most one in each class.
    """
    labels = index.rows["label"].astype(np.int64)
    order = np.lexsort((_hash_names(index, labels, b"%d/" % fold.seed), labels))
    numbers = np.empty(len(labels), np.int64)
    numbers[order] = np.arange(len(labels)) % fold.count + 1
    return numbers


def _hash_names(index: Images, labels: np.ndarray, prefix: bytes = b"") -> np.ndarray:
    """Return the hash of every image's class and name, behind a prefix, as a share of all hashes:
    float64 [images], from 0 to 1."""
    classes = [os.fsencode(name) for name in index.classes]
    places = np.empty(len(index))
    for i, (name, label) in enumerate(zip(index.names, labels.tolist(), strict=True)):
        if not name:
            raise DataError(
                f"{index.source.title} has no image names, and a share is held out by name. "
                "To add names, use lockstep data pack --format folder"
            )
        digest = hashlib.sha256(prefix + classes[label] + b"/" + name.rpartition(b"/")[2]).digest()
        places[i] = int.from_bytes(digest[:8], "big") / 2**64
    return places
