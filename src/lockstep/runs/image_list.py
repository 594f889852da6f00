"""The images of a run, `images.npz` in its folder: a run that cannot resume says which ones differ.

For `train` and `val`, it holds the `classes`, and for each image its name, label, length, and the
checksum of its bytes: `train.labels` and so on. Validation images that were not read are missing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.images import Names, printable
from lockstep.data.index import Index
from lockstep.data.sources import shorten_list
from lockstep.data.split import Sets
from lockstep.runs.image_results import DAMAGE, read_records
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing

FILE = "images.npz"
_SHOWN = 5
_SAMPLE = 64
Arrays = dict[str, np.ndarray]


def check_listed_images(out: Path, sets: Sets, *, is_new: bool) -> None:
    """Raise `CheckpointError` if images do not have the bytes that they had in the run in a folder.
    List those in the folder that are not listed yet; all of them if the run is new.

    The indexes have the digests of the run: number, order, labels and sizes of the images are the
    same.
    """
    before = {} if is_new else _read(out)
    now: Arrays = {}
    changes = []
    for name, index in _name_sets(sets):
        checksums = before.get(f"{name}.checksums", index.checksums)
        if len(checksums) == len(index.checksums):
            changed = np.flatnonzero(checksums != index.checksums)
            changes += _describe(name, {"have other bytes": map(index.place, changed.tolist())})
        if len(checksums) < len(index.checksums) or f"{name}.labels" not in before:
            now |= _list(name, index)
    if changes:
        raise CheckpointError(
            f"{out} was trained or evaluated on other images than those in"
            f" {sets.training.source.title}: {'; '.join(changes)}. Restore its images, or use"
            " another --out."
        )
    if now:
        with replacing(out / FILE) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **(before | now))  # type: ignore[arg-type]


def read_sample(index: Index, turn: int) -> None:
    """Read images spread over an index, other ones at each `turn`. Raises `DataError` if one of
    them changed since it was indexed."""
    count = min(len(index), _SAMPLE)
    if not index.is_stored and len(index.checksums):
        for i in range(count):
            index.read((i * len(index) // count + turn) % len(index))


def describe_other_images(out: Path, sets: Sets) -> str:
    """Return which images differ from those of the run in a folder; "" if that is not known."""
    before = _read(out)
    changes = []
    for name, index in _name_sets(sets):
        if f"{name}.labels" not in before:
            continue
        then = _key_images(name, before)
        now = _key_images(name, _list(name, index))
        both = then.keys() & now.keys()
        differences = {
            "are missing": sorted(then.keys() - both),
            "are new": sorted(now.keys() - both),
            "changed": sorted(key for key in both if then[key] != now[key]),
        }
        changes += _describe(name, differences)
        old_classes = set(before[f"{name}.classes"].tolist())
        for words, classes in (
            ("are missing", old_classes - set(index.classes)),
            ("are new", set(index.classes) - old_classes),
        ):
            if classes:
                names = shorten_list(list(map(printable, sorted(classes))), _SHOWN)
                changes.append(f"{name}: classes {words} ({names})")
    return "; ".join(changes)


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


def _key_images(name: str, arrays: Arrays) -> dict[str, Any]:
    """Return class, length and checksum of each image by its name, or by its number without one."""
    columns = [arrays[f"{name}.{column}"] for column in ("labels", "lengths", "checksums")]
    labels, lengths, checksums = columns
    classes = arrays[f"{name}.classes"].tolist()
    images = {}
    for i, image in enumerate(Names(arrays[f"{name}.names"], arrays[f"{name}.name_ends"])):
        key = printable(image.decode(errors="surrogateescape")) or f"image {i}"
        images[key] = (classes[labels[i]], lengths[i], *checksums[i : i + 1])
    return images


def _describe(name: str, images: dict[str, Any]) -> list[str]:
    """Return how many images differ in each way, with a few of them."""
    parts = []
    for words, places in images.items():
        places = list(map(printable, places))
        if places:
            parts.append(f"{name}: {len(places)} images {words} ({shorten_list(places, _SHOWN)})")
    return parts


def _read(out: Path) -> Arrays:
    """Return the arrays of the file in a folder; none if it is missing or damaged."""
    try:
        return read_records(out / FILE)
    except (OSError, *DAMAGE):
        return {}
