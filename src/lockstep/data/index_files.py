"""The files of an index: arrays that are mapped into memory, and a description in JSON.

They may come with a stranger's data set, so everything in them is checked when they are opened.
"""

import hashlib
import json
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.class_folders import KINDS
from lockstep.data.images import ROW
from lockstep.data.sources import FOLDER
from lockstep.system.files import replacing, write_text
from lockstep.system.regular_files import (
    ANY_SIZE,
    IMAGE,
    NAMES,
    open_regular,
    read_regular_text,
)
from lockstep.system.strict_json import Check, is_count, is_list_of, is_text, parsed

DESCRIPTION = "index.json"
_ARRAYS = {
    "rows": ROW,
    "names": np.dtype("u1"),
    "name_ends": np.dtype("<u4"),
    "times": np.dtype("<u4"),
    "orientations": np.dtype("u1"),
    "checksums": np.dtype("<u4"),
}
"""The files of an index, one array each. Indexes of older versions do not have `checksums`."""
_AT_ONCE = 2**12
_DOT, _SLASH = b"./"
_LONGEST_NAME = 2048
"""Two names of 255 bytes on a disk; 1,024 bytes in an object store."""


class IndexFiles(NamedTuple):
    """The contents of the files."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    """By name: `rows`, `names`, `name_ends`, `times`, `orientations` and `checksums`, which may be
    empty."""


def _is_pair_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and all(map(check, value))


def _is_skipped(value: Any) -> bool:
    """Return whether a value is a kind of what is left out, its place, and perhaps a count."""
    if not isinstance(value, list) or len(value) not in (2, 3):
        return False
    kind, place, *count = value
    return is_text(kind) and kind in KINDS and is_text(place) and all(map(is_count, count))


_FIELDS: dict[str, Check] = {
    "stamp": is_text,
    "began_ns": lambda value: value is None or type(value) is int,
    "digest": is_text,
    "checksum": is_text,
    "classes": is_list_of(is_text),
    "numbered": lambda value: isinstance(value, bool),
    "states": is_list_of(_is_pair_of(lambda value: type(value) is int)),
    "quarantined": is_list_of(_is_pair_of(is_text)),
    "skipped": is_list_of(_is_skipped),
}


def write_index(cache: Path, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the files of an index; the description comes last."""
    for name, dtype in _ARRAYS.items():
        with replacing(cache / name) as partial:
            np.ascontiguousarray(arrays[name], dtype).tofile(partial)
    about = about | _hash_arrays(arrays)
    write_text(cache / DESCRIPTION, json.dumps(about, indent=1, allow_nan=False))


def _hash_arrays(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    """Return the hash of `checksums`, and that of all others."""
    digests = {"checksums": hashlib.sha256(), "checksum": hashlib.sha256()}
    for name, dtype in _ARRAYS.items():
        digest = digests.get(name, digests["checksum"])
        digest.update(np.ascontiguousarray(arrays[name], dtype).data)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def read_index(
    cache: Path, stamp: str, format: str, folders: set[str], states: list[tuple[int, int]]
) -> IndexFiles | None:
    """Return the files of an index; None if there are none, or if they are of other images.

    `stamp` is that of the images as they are, `folders` are their class folders, and `states` sizes
    and times of the files that hold many images. Raises `ValueError` with the reason if the files
    are damaged, or could not be those of an index of these images.
    """
    try:
        about = parsed(read_regular_text(cache / DESCRIPTION, NAMES))
    except FileNotFoundError:
        return None
    if not isinstance(about, dict) or about.get("stamp") != stamp:
        return None
    for name, is_right in _FIELDS.items():
        if not is_right(about.get(name)):
            raise ValueError(f"{name} does not have the form of an index")
    if list(map(tuple, about["states"])) != states:
        raise ValueError("states do not match the files")
    if len(set(about["classes"])) < len(about["classes"]):
        raise ValueError("two classes have the same name")
    arrays = _map_arrays(cache, are_files=format == FOLDER and not states, about=about)
    used = _check_rows(arrays, states, len(about["classes"]))
    if format == FOLDER:
        if not set(compress(about["classes"], used)) <= folders:
            raise ValueError("classes do not match the class folders")
        _check_names(arrays, [name if name in folders else "" for name in about["classes"]])
    # Files left by a killed process or a full disk do not match.
    if any(about.get(name, digest) != digest for name, digest in _hash_arrays(arrays).items()):
        raise ValueError("the arrays do not match the checksum")
    return IndexFiles(about, arrays)


def _map_arrays(cache: Path, *, are_files: bool, about: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays, after a look at the lengths of all of them."""
    arrays = {}
    for name, dtype in _ARRAYS.items():
        is_missing = name == "checksums" and name not in about
        arrays[name] = np.zeros(0, dtype) if is_missing else _map(cache / name, dtype)
    count = len(arrays["rows"])
    lengths = dict.fromkeys(("name_ends", "orientations"), count)
    lengths["checksums"] = count * ("checksums" in about)
    lengths["times"] = count * are_files
    lengths["names"] = 0
    if len(arrays["name_ends"]):
        lengths["names"] = int(arrays["name_ends"][-1])
    for name, length in lengths.items():
        if len(arrays[name]) != length or not count:
            raise ValueError(f"{name} has {len(arrays[name])} entries, expected {length}")
    return arrays


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link, expected a file")
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    with open_regular(path, ANY_SIZE) as file:
        return np.memmap(file, dtype, "r")


def _check_rows(
    arrays: dict[str, np.ndarray], states: list[tuple[int, int]], classes: int
) -> np.ndarray:
    """Raise `ValueError` if a value is out of its range. Return which classes have images.

    The arrays are read in parts: what is wrong, such as a file of zeros larger than any disk, is
    wrong at the beginning.
    """
    sizes = np.array([size for size, _ in states] or [2**62], np.int64)
    used = np.zeros(classes, np.bool_)
    last = 0
    for first in range(0, len(arrays["rows"]), _AT_ONCE):
        rows, ends, turns = (
            arrays[name][first : first + _AT_ONCE] for name in ("rows", "name_ends", "orientations")
        )
        begins = np.where(rows["offset"] < 0, ~rows["offset"], rows["offset"])
        room = sizes[np.minimum(rows["file"], len(sizes) - 1)] - rows["length"]
        wrong = {
            "labels": (rows["label"] < 0) | (rows["label"] >= classes),
            "places": (rows["file"] >= len(sizes)) | (begins > room),
            "lengths": (rows["length"] == 0) | (rows["length"] > IMAGE.most_bytes),
            "sizes": (rows["height"] == 0) | (rows["width"] == 0),
            "orientations": (turns < 1) | (turns > 8),
            "names": np.diff(ends.astype(np.int64), prepend=last) < 0,
        }
        for name, where in wrong.items():
            if where.any():
                raise ValueError(f"{name} are out of range")
        used[rows["label"]] = True
        last = int(ends[-1])
    return used


def _check_names(arrays: dict[str, np.ndarray], classes: list[str]) -> None:
    """Raise `ValueError` unless every name is `class/file`, with the class of its label. The class
    is a folder, so one slash and the name of a file stay in it."""
    folders = np.array([name.encode("utf-8", "surrogateescape") for name in classes])
    letters = folders.view(np.uint8).reshape(len(folders), -1)
    widths = np.char.str_len(folders)
    last = 0
    for first in range(0, len(arrays["rows"]), _AT_ONCE):
        labels = arrays["rows"]["label"][first : first + _AT_ONCE]
        ends = arrays["name_ends"][first : first + _AT_ONCE].astype(np.int64) - last
        begins = np.insert(ends[:-1], 0, 0)
        slashes = begins + widths[labels]
        lengths = ends - slashes - 1
        if lengths.min() < 1 or lengths.max() > _LONGEST_NAME:
            raise ValueError("names are empty or too long")
        text = np.asarray(arrays["names"][last : last + ends[-1]])
        is_dot = (text[slashes + 1] == _DOT) & (text[ends - 1] == _DOT) & (lengths < 3)
        is_wrong = np.count_nonzero(text == _SLASH) != len(ends) or is_dot.any()
        is_wrong |= (text[slashes] != _SLASH).any() or not text.all()
        for place in range(letters.shape[1]):
            rest = np.flatnonzero(widths[labels] > place)
            is_wrong |= (text[begins[rest] + place] != letters[labels[rest], place]).any()
        if is_wrong:
            raise ValueError("names do not match the classes of the images")
        last += int(ends[-1])
