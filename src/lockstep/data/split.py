"""The training and validation images of a run, be it that a data set has both or that a share of its images is set apart.

An image is set apart if the hash of its class and name is within the share of all hashes, so that it stays where it is
when others are added. Every class keeps an image on either side: where the hashes leave none for validation, the smallest
stands in, and where they leave none for training, the largest. The only image of a class is for training.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.data.index import Index, open_index, stored_index, subset
from lockstep.data.listing import Progress
from lockstep.data.sources import ALIASES, Source, class_folders, find_source, find_split, holds_split
from lockstep.system.errors import DataError

TYPICAL_SHARE = 0.1
"""What messages propose."""


class Sets(NamedTuple):
    """The images of a run."""

    training: Index
    validation: Index
    data: Path
    """The data set's folder."""
    notes: list[str]
    """What was understood in another way than it was written."""


def open_sets(data: Path, share: float, progress: Callable[[str], Progress]) -> Sets:
    """Return the training and validation images of a data set, or of one split of it that is given in its place.

    With a share above 0 it is set apart from the training images, or from all of a folder of classes. `progress` returns
    where to tell how far something is, given what. Raises `DataError` if there are no validation images, or if there are
    and a share is asked for.
    """
    if share:
        whole = open_index(whole_source(data), progress=progress("indexing"))
        return Sets(*divided(whole, share), data, [])
    whole_set = _of_which_it_is_a_split(data)
    notes = [] if whole_set is None else [f"{data} is a part of {whole_set}, which is trained on: --data {whole_set}"]
    data = whole_set or data
    training = open_index(_split_of(data, "train"), progress=progress("indexing train"))
    validation = open_index(_split_of(data, "val"), classes=training.classes, progress=progress("indexing val"))
    return Sets(training, validation, data, notes)


def _split_of(data: Path, split: str) -> Source:
    try:
        return find_split(data, split)
    except DataError as error:
        if not data.is_dir() or holds_split(data, "val") or not (holds_split(data, "train") or _holds_classes(data)):
            raise
        where = "the training images" if holds_split(data, "train") else f"the classes in {data}"
        raise DataError(f"{error}. To set a share of {where} apart for validation: --split {TYPICAL_SHARE}") from None


def _holds_classes(data: Path) -> bool:
    try:
        return bool(class_folders(data))
    except DataError:
        return False


def _of_which_it_is_a_split(data: Path) -> Path | None:
    """Return the data set, if a folder is not one but its training or validation images, such as DATA/train."""
    parent = data.parent if data.name else data.absolute().parent
    named = data.absolute().name.lower() in {alias for aliases in ALIASES.values() for alias in aliases}
    if named and not holds_split(data, "train") and all(holds_split(parent, split) for split in ALIASES):
        return parent
    return None


def whole_source(data: Path) -> Source:
    """Return what a share is set apart from: the training images, or all images of a folder of classes.

    Raises `DataError` if there are validation images already.
    """
    if holds_split(data, "val"):
        raise DataError(
            f"{data} has validation images, so that no share is set apart: leave out --split, or give --data "
            f"{data / ALIASES['train'][0]} to set a share of the training images apart"
        )
    return find_split(data, "train") if holds_split(data, "train") else find_source(data)


def stored_validation(data: Path, share: float, classes: tuple[str, ...]) -> Index | None:
    """Return the index of a run's validation images if it is there and fits; see `lockstep.data.index.stored_index`."""
    if not share:
        return stored_index(find_split(data, "val"), classes=classes)
    whole = stored_index(whole_source(data), classes=classes)
    return whole if whole is None else divided(whole, share)[1]


def divided(index: Index, share: float) -> tuple[Index, Index]:
    """Return the training and the validation images of an index, both in its order.

    Raises `DataError` if images have no names, or if none is left for validation.
    """
    apart = _set_apart(index, share)
    if not apart.any():
        raise DataError(
            f"{index.source.named} has {len(index)} images of {len(index.classes)} classes, one of each: none can be set "
            "apart for validation; add images"
        )
    training, validation = (subset(index, np.flatnonzero(chosen)) for chosen in (~apart, apart))
    return training, replace(validation, quarantined=())


def _set_apart(index: Index, share: float) -> np.ndarray:
    """Return which images are for validation: bool [images]."""
    labels = index.rows["label"].astype(np.int64)
    places = _places(index, labels)
    order = np.lexsort((places, labels))  # the images of a class side by side, rising
    counts = np.bincount(labels, minlength=len(index.classes))
    below = np.bincount(labels[places < share], minlength=len(index.classes))
    apart = np.minimum(np.maximum(below, 1), np.maximum(counts - 1, 0))
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels[order]]
    chosen = np.zeros(len(labels), bool)
    chosen[order] = rank < apart[labels[order]]
    return chosen


def _places(index: Index, labels: np.ndarray) -> np.ndarray:
    """Return where the hash of every image's class and name stands among all hashes: float64 [images], within 0 to 1."""
    classes = [os.fsencode(name) for name in index.classes]
    places = np.empty(len(index))
    for i, (name, label) in enumerate(zip(index.names, labels.tolist(), strict=True)):
        if not name:
            raise DataError(
                f"{index.source.named} keeps no names of images, by which a share is set apart; "
                "lockstep data pack --format folder gives them names"
            )
        digest = hashlib.sha256(classes[label] + b"/" + name.rpartition(b"/")[2]).digest()
        places[i] = int.from_bytes(digest[:8], "big") / 2**64
    return places
