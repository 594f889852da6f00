"""What a pack writes: the images of each split, their names, and the number of files."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lockstep.data.containers import Bytes
from lockstep.data.decoding.file_parts import JPEG_START
from lockstep.data.decoding.image_formats import BOX
from lockstep.data.images import CHANGED, Images
from lockstep.data.index import load_index, read_quarantine
from lockstep.data.listing import Listing, list_images, read_classes
from lockstep.data.packing.faults import Faults
from lockstep.data.packing.target import read_states
from lockstep.data.sources import ALIASES, CACHE, CLASSES, FOLDER, Source, find_sources
from lockstep.system.crc import compute_crc
from lockstep.system.errors import DataError

SHARD_BYTES = 2**27
"""The approximate size of a TFRecord or WebDataset file, unless the number of files is given.
ImageNet: a thousand files."""
_LONGEST_NAME = 255
"""The maximum length of a file's name, in bytes."""
_NO_COLUMN = re.compile(rb"[\n\r\t\0]")
_KINDS = {
    **{JPEG_START: "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"},
    **{b"II*\0": "tif", b"MM\0*": "tif", b"P": "pnm", b"ftypavi": "avif", b"ftyp": "heic"},
}
"""The first bytes of images, and the endings of their names, by which other programs decode them.
AVIF and HEIC are identified by the bytes after the first four."""
_OTHER = "img"


@dataclass(frozen=True)
class Packing:
    """How to write a data set."""

    format: str
    """One of `FORMATS`."""
    shards: int = 0
    """The number of files for each split; 0: one for RecordIO, else one for each `SHARD_BYTES`."""
    resize: int = 0
    """Larger images are reduced to this shorter side in pixels; 0 copies the bytes."""
    quality: int = 95
    """JPEG quality of reduced images."""
    first_label: int = 0
    """The number of the first class in the source's files."""
    workers: int = 0
    """The number of threads that read, write and reduce images; 0 means one for each core."""


@dataclass(frozen=True)
class Split:
    """The images of a split, and how to write them."""

    name: str
    """"train", "val", or empty where the source has no splits."""
    listing: Listing
    names: tuple[str, ...] | None
    """`class/file` of every sample; None if samples are named by their numbers."""
    format: str
    """The format to write."""
    states: np.ndarray
    """Size and modification time of every file of the source: int64 [files, 2]."""
    faults: Faults
    """The images that are left out because they are bad."""
    checksums: np.ndarray
    """int64: the CRC-32C of each image in the stored index; -1 where it is not known."""

    def name_sample(self, number: int, data: Bytes) -> str:
        """Return the name of the sample that is written with this number."""
        if self.names is not None:
            return self.names[number]
        file = f"{number:08d}.{find_kind(data)}"
        # With a class in front, files listed by name would be ordered by class.
        return f"{self.name_class(number)}/{file}" if self.format == FOLDER else file

    def possible_names(self, number: int) -> set[str]:
        """Return all names that the sample can get, depending on its bytes."""
        name = self.name_sample(number, b"")
        if self.names is not None:
            return {name}
        return {name.removesuffix(_OTHER) + kind for kind in (*_KINDS.values(), _OTHER)}

    def name_class(self, number: int) -> str:
        """Return the name of the class of a sample."""
        return self.listing.classes[int(self.listing.rows["label"][number])]

    def check_bytes(self, number: int, data: Bytes) -> None:
        """Raise `DataError` if the bytes of an image are not those that were indexed."""
        if self.checksums[number] not in (-1, compute_crc(data)):
            raise self.listing.explain_change(number, CHANGED)

    def sound(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the images that are not known to be bad."""
        bad = self.faults.reasons()
        return [number for number in numbers if number not in bad]

    def rows(self, numbers: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """Yield number, label and name of samples."""
        labels = self.listing.rows["label"][numbers].tolist()
        for number, label in zip(numbers, labels, strict=True):
            yield number, label, self.name_sample(number, JPEG_START)

    @property
    def lengths(self) -> np.ndarray:
        """The size of every image in bytes; in an image folder, the size of its file."""
        if self.listing.source.format == FOLDER:
            return self.states[:, 0]
        return self.listing.rows["length"]


def list_splits(source: Path, target: Path, packing: Packing) -> Iterator[Split]:
    """Yield the splits of a data set, to be written to `target`. An unfinished pack keeps its order
    of classes. Raises `DataError` if its files are damaged."""
    classes: tuple[str, ...] | None = None
    for name, where in find_sources(source).items():
        quarantine = read_quarantine(where)
        options: Any = {"first_label": packing.first_label, "quarantine": quarantine}
        listing = list_images(where, classes, **options)
        if classes is None and (target / CLASSES).is_file():
            begun = read_classes(Source(FOLDER, target)) or ()
            if begun != listing.classes and sorted(begun) == sorted(listing.classes):
                listing = list_images(where, begun, **options)
        if listing.damaged and where.format != FOLDER:
            bad = listing.damaged[0]
            raise DataError(
                f"{where.root}: {len(listing.damaged)} damaged parts of files hold no usable image;"
                f" the first is {bad.file}: {bad.reason}. lockstep data check lists all of them"
            )
        classes = listing.classes
        names = _keep_names(listing, packing)
        faults = Faults(target / CACHE / f"pack.{name or 'images'}.faults")
        checksums = _find_checksums(listing)
        yield Split(name, listing, names, packing.format, read_states(listing), faults, checksums)


def _find_checksums(listing: Listing) -> np.ndarray:
    """Return the checksum of each image of a listing: int64, -1 if no stored index knows it."""
    index = load_index(listing.source)
    if index is None or not len(index.checksums):
        return np.full(len(listing), -1, np.int64)
    known = dict(zip(_identify_images(index), index.checksums.tolist(), strict=True))
    return np.array([known.get(image, -1) for image in _identify_images(listing)], np.int64)


def _identify_images(images: Images) -> Iterable[Any]:
    """Return what identifies each image: its name in a folder, else its place."""
    if images.source.format == FOLDER:
        return images.names
    return zip(images.rows["file"].tolist(), images.rows["offset"].tolist(), strict=True)


def find_kind(data: Bytes) -> str:
    """Return the ending of the name of an image with these bytes."""
    for begin, kind in _KINDS.items():
        skipped = 4 * begin.startswith(BOX)
        if data[skipped : skipped + len(begin)] == begin:
            return kind
    return _OTHER


def check_class_names(classes: Sequence[str], format: str) -> None:
    """Raise `DataError` if a class cannot be a line of `classes.txt`, or a folder to be written."""
    for label, name in enumerate(classes):
        wrong = ""
        if not name or name != name.strip() or set(name) & set("\n\r\0"):
            wrong = f"a line of {CLASSES}; rename it"
        elif format == FOLDER and (name.startswith(".") or "/" in name):
            wrong = f"the name of a folder; rename it in {CLASSES}"
        if wrong:
            raise DataError(f"class {label} is named {name!r}, which cannot be {wrong}")


def _keep_names(listing: Listing, packing: Packing) -> tuple[str, ...] | None:
    """Return `class/file` of every sample, or None if these names would change their order."""
    names = []
    before = (0, b"")
    for name, label in zip(listing.names, listing.rows["label"].tolist(), strict=True):
        file = name.rpartition(b"/")[2]
        # The `.lst` of RecordIO has lines with columns.
        is_name = file and not file.startswith(b".") and len(file) <= _LONGEST_NAME
        if not is_name or _NO_COLUMN.search(file):
            return None
        if packing.resize and not file.lower().endswith((b".jpg", b".jpeg")):
            file = os.fsencode(f"{PurePosixPath(os.fsdecode(file)).stem}.jpg")
        # RecordIO is read by number, the other formats by class and then by name.
        if (label, file) <= before and packing.format != "recordio":
            return None
        before = (label, file)
        names.append(f"{listing.classes[label]}/{os.fsdecode(file)}")
    return tuple(names)


def identify(splits: list[Split], packing: Packing) -> str:
    """Return a text that is equal for images of the same names and the same packing."""
    digest = hashlib.sha256()
    for split in splits:
        listing = split.listing
        about = [split.name, listing.source.format, listing.source.files, listing.classes]
        digest.update(json.dumps(about, allow_nan=False).encode())
        for array in (listing.rows, listing.names.text, listing.names.ends):
            digest.update(np.ascontiguousarray(array).data)
    identity = {
        "format": packing.format,
        "shards": {split.name: count_shards(split, packing) for split in splits},
        "resize": packing.resize,
        "quality": packing.quality,
        "images": digest.hexdigest(),
    }
    return json.dumps(identity, allow_nan=False)


def count_shards(split: Split, packing: Packing) -> int:
    """Return the number of files to write for a split."""
    shards = packing.shards
    if not shards and packing.format != "recordio":
        shards = -(-int(split.lengths.sum(dtype=np.int64)) // SHARD_BYTES)
    return max(min(shards, len(split.listing)), 1)


def shard_name(format: str, split: str, shard: int, shards: int) -> str:
    """Return the name of a file of a split, as is usual for the format.

    >>> shard_name("recordio", "val", 0, 1), shard_name("tfrecord", "val", 7, 128)
    ('val.rec', 'validation-00007-of-00128')
    >>> shard_name("webdataset", "train", 7, 128)
    'train-000007.tar'
    """
    split = split or "images"
    if format == "tfrecord":
        return f"{ALIASES.get(split, (split,))[-1]}-{shard:05d}-of-{shards:05d}"
    if format == "webdataset":
        return f"{split}-{shard:06d}.tar"
    return f"{split}.rec" if shards == 1 else f"{split}-{shard:05d}-of-{shards:05d}.rec"
