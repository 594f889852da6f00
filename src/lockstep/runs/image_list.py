"""The images of a run, `images.npz` in its folder: a run that cannot resume says which ones differ.

For `train` and `val`, it holds the `classes`, and for each image its name, label, length, and the
checksum of its bytes: `train.labels` and so on. Validation images that were not read are missing.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.images import Names, printable
from lockstep.data.index import Index
from lockstep.data.sources import shorten_list
from lockstep.data.split import Sets
from lockstep.runs.image_results import DAMAGE, read_records
from lockstep.system.files import replacing

FILE = "images.npz"
_SHOWN = 5
_SAMPLE = 64
Arrays = dict[str, np.ndarray]


def list_images(out: Path, sets: Sets, *, is_new: bool) -> None:
    """List the images in a run's folder that are not listed yet; all of them if the run is new."""
    before = {} if is_new else _read(out)
    now: Arrays = {}
    for name, index in _name_sets(sets):
        if len(before.get(f"{name}.checksums", ())) < len(index.checksums) or not before:
            now |= _list(name, index)
    if now:
        with replacing(out / FILE) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **(before | now))  # type: ignore[arg-type]


def compare_images(out: Path, sets: Sets) -> str:
    """Return which images differ from those that are listed in a run's folder; "" if none does, or
    if that is not known."""
    before = _read(out)
    changes: list[str] = []
    try:
        for name, index in _name_sets(sets):
            if f"{name}.labels" in before:
                changes += _compare(name, before, _list(name, index))
    except (IndexError, TypeError, *DAMAGE):
        return ""
    return "; ".join(changes)


def read_sample(index: Index, turn: int) -> None:
    """Read images spread over an index, other ones at each `turn`. Raises `DataError` if one of
    them changed since it was indexed."""
    count = min(len(index), _SAMPLE)
    if not index.is_stored and len(index.checksums):
        for i in range(count):
            index.read((i * len(index) // count + turn) % len(index))


def _name_sets(sets: Sets) -> Iterator[tuple[str, Index]]:
    """Yield the indexes of a run that have images, with their names."""
    for name, index in (("train", sets.training), ("val", sets.validation)):
        if len(index):
            yield name, index


def _list(name: str, index: Index) -> Arrays:
    columns = {
        "classes": np.array(index.classes, str),
        "labels": index.rows["label"],
        "lengths": index.rows["length"],
        "checksums": index.checksums,
        "names": index.names.text,
        "name_ends": index.names.ends,
    }
    return {f"{name}.{column}": values for column, values in columns.items()}


def _compare(name: str, before: Arrays, now: Arrays) -> list[str]:
    """Return how the images of a set differ: a few of each kind, and how many."""
    columns = [f"{name}.{column}" for column in ("labels", "lengths", "checksums")]
    if not (len(before[columns[-1]]) and len(now[columns[-1]])):
        columns.pop()
    classes = f"{name}.classes"
    if all(np.array_equal(before[column], now[column]) for column in (classes, *columns)):
        return []
    then_known, now_known = (_key_images(name, columns, arrays) for arrays in (before, now))
    both = then_known.keys() & now_known.keys()
    old_classes, new_classes = (set(arrays[classes].tolist()) for arrays in (before, now))
    differences = {
        "images are missing": then_known.keys() - both,
        "images are new": now_known.keys() - both,
        "images changed": {key for key in both if then_known[key] != now_known[key]},
        "classes are missing": old_classes - new_classes,
        "classes are new": new_classes - old_classes,
    }
    parts = []
    for words, names in differences.items():
        if names:
            shown = shorten_list(list(map(printable, sorted(names))), _SHOWN)
            parts.append(f"{name}: {len(names)} {words} ({shown})")
    return parts


def _key_images(name: str, columns: list[str], arrays: Arrays) -> dict[str, Any]:
    """Return the class and other columns of each image by its name, or by its number without."""
    classes = arrays[f"{name}.classes"].tolist()
    labels, *others = (arrays[column].tolist() for column in columns)
    images = {}
    for i, image in enumerate(Names(arrays[f"{name}.names"], arrays[f"{name}.name_ends"])):
        about = (classes[labels[i]], *(values[i] for values in others))
        images[os.fsdecode(image) or f"number {i}"] = about
    return images


def _read(out: Path) -> Arrays:
    """Return the arrays of the file in a folder; none if it is missing or damaged."""
    try:
        return read_records(out / FILE)
    except (OSError, *DAMAGE):
        return {}
