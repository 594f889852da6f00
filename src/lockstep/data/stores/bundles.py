"""Class folders in an object store, where every image is an object.

The folder that stands for the store has a folder for each class with two files: the list of its
objects, and an empty file, the bundle, as long as all images after one another, each at the start
of a block. An image is thus a range of a file, as in other formats, and is fetched and kept in
the same way.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.data.decoding.image_formats import is_image_name
from lockstep.data.sources import BUNDLE, MEMBERS, name_folder
from lockstep.data.stores.cached_object import BLOCK_BYTES
from lockstep.data.stores.objects import RangeReader, StoredObject, hash_version
from lockstep.system.errors import DataError
from lockstep.system.files import write_bytes
from lockstep.system.regular_files import RECORDS, read_regular
from lockstep.system.strict_json import parsed


class Member(NamedTuple):
    """An object of a class folder."""

    name: str
    """In the class folder. If it has a slash, the object is deeper."""
    size: int
    version: str
    begin: int
    """Where the image begins in the bundle. What is no image has no place in it."""


def is_image(name: str) -> bool:
    """Return whether an object is an image of the class, by its name in the class folder."""
    return "/" not in name and is_image_name(name)


def make_bundle(folder: str, items: Sequence[StoredObject]) -> StoredObject:
    """Return the bundle of a class folder, given by its name in the store, as if it were an object:
    it changes when one of the objects does."""
    images = [item.size for item in items if is_image(item.name.removeprefix(f"{folder}/"))]
    digest = _hash_list(_format_list(folder, items))
    modified = max(item.modified for item in items)
    return StoredObject(f"{folder}/{BUNDLE}", sum(map(_round_up, images)), digest, modified)


def write_members(path: Path, bundle: StoredObject, items: Sequence[StoredObject]) -> None:
    """Write the list of a class folder's objects into the folder `path`, which stands for it,
    unless it is there."""
    file = path / MEMBERS
    if not file.is_file() or _hash_list(read_regular(file, RECORDS)) != bundle.version:
        path.mkdir(parents=True, exist_ok=True)
        write_bytes(file, _format_list(bundle.name.removesuffix(f"/{BUNDLE}"), items))


def _format_list(folder: str, items: Iterable[StoredObject]) -> bytes:
    fields = ([item.name.removeprefix(f"{folder}/"), item.size, item.version] for item in items)
    return "\n".join(map(json.dumps, fields)).encode()


def _hash_list(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _round_up(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def read_members(path: Path) -> Iterator[Member]:
    """Yield the objects of a class folder, by the list in the folder that stands for it. Raises
    `DataError` if it is not the list of the bundle that is there."""
    try:
        time = (path / BUNDLE).stat().st_mtime_ns
    except FileNotFoundError:
        raise explain_new_list(path) from None
    for _, member in _parse_list(path, time % 10**9):
        yield member


def _parse_list(path: Path, fraction: int) -> Iterator[tuple[bytes, Member]]:
    """Yield the lines of a list and what they say. `fraction` stands for the bundle's version; see
    `hash_version`."""
    data = read_regular(path / MEMBERS, RECORDS)
    if hash_version(_hash_list(data)) != fraction:
        raise explain_new_list(path)
    begin = 0
    for line in data.splitlines():
        name, size, version = parsed(line)
        yield line, Member(name, size, version, begin)
        if is_image(name):
            begin += _round_up(size)


def explain_new_list(folder: Path) -> DataError:
    """Return the error for a class folder of which another command has written another list."""
    return DataError(f"{name_folder(folder)} has changed: another command listed it. Start again")


class BundleReader:
    """Reads ranges of a store's objects, and of bundles. Threads may call it at the same time."""

    def __init__(self, store: RangeReader, root: Path, items: Iterable[StoredObject]) -> None:
        """`root` is the folder that stands for the store; `items` are its files, also those that
        are no bundles. Raises `DataError` if there are other lists than those of the bundles."""
        self._store = store
        self._lines: dict[str, list[bytes]] = {}
        """By the name of the bundle: the lines of its images, which take less than half of what
        their parsed values do."""
        self._begins: dict[str, np.ndarray] = {}
        """int64 [images]: where they begin in the bundle."""
        for item in items:
            if item.name.endswith(f"/{BUNDLE}"):
                path = root / Path(item.name).parent
                lines = []
                begins = []
                for line, member in _parse_list(path, hash_version(item.version)):
                    if is_image(member.name) and member.size:
                        lines.append(line)
                        begins.append(member.begin)
                self._lines[item.name] = lines
                self._begins[item.name] = np.array(begins, np.int64)

    def read_range(self, item: StoredObject, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of an object or a bundle; raises as
        `ObjectStore.read_range` does. Between images a bundle has zeros."""
        if item.name not in self._begins:
            return self._store.read_range(item, begin, end)
        data = memoryview(bytearray(end - begin))
        begins = self._begins[item.name]
        first = int(np.searchsorted(begins, begin, "right")) - 1
        last = int(np.searchsorted(begins, end, "left"))
        for number in range(max(first, 0), last):
            name, size, version = parsed(self._lines[item.name][number])
            first_byte = int(begins[number])
            start = max(begin, first_byte)
            stop = min(end, first_byte + size)
            if start < stop:
                path = f"{item.name.removesuffix(BUNDLE)}{name}"
                part = StoredObject(path, size, version, item.modified)
                place = slice(start - begin, stop - begin)
                data[place] = self._store.read_range(part, start - first_byte, stop - first_byte)
        return data
