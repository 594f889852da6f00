"""The index of a split: place, label, size and name of every good image, and the list of bad
images.

It is built once by decoding every image. It is kept next to the data, or in the user's cache if the
data is read-only, and is mapped into memory. It takes 37 bytes for each image plus its name, for
every storage format.
"""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.class_folders import (
    Skipped,
    check_layout,
    explain_no_images,
    list_beside_classes,
    list_class_folders,
    read_class_folder,
)
from lockstep.data.images import (
    CHANGED,
    Images,
    ImageSizes,
    Names,
    Progress,
    Quarantined,
    printable,
    read_file,
    relabel,
)
from lockstep.data.index_files import DESCRIPTION, read_index, write_index
from lockstep.data.inspection import LEFT_OUT, is_usable, list_and_inspect
from lockstep.data.listing import Listing, list_images, order_as_listed
from lockstep.data.sources import (
    CACHE,
    CLASSES,
    FOLDER,
    QUARANTINE,
    Source,
    find_source,
    name_folder,
)
from lockstep.recipes import Recipe
from lockstep.system.crc import compute_crc
from lockstep.system.errors import DataError
from lockstep.system.files import user_cache
from lockstep.system.locks import hold_lock
from lockstep.system.regular_files import (
    RECORDS,
    explain_failure,
    is_failure,
    read_regular,
    read_regular_text,
)
from lockstep.system.strict_json import parsed

VERSION = 5


@dataclass(frozen=True)
class Index(Images):
    """Every usable image of a source."""

    times: np.ndarray
    """uint32: in an image folder, the time of each file's last change, in microseconds modulo
    2**32; otherwise empty."""
    orientations: np.ndarray
    """uint8: the EXIF orientation of each image, 1 to 8."""
    states: tuple[tuple[int, int], ...]
    """Size and modification time, at the time of listing, of every file that holds many images."""
    quarantined: tuple[Quarantined, ...]
    skipped: tuple[Skipped, ...]
    """What is in class folders and not an image of a class."""
    digest: str
    """SHA-256 of labels, lengths, sizes and classes: equal for the same images in the same order in
    any format."""
    checksums: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    """uint32: the CRC-32C of the bytes of each image; empty in an index of an older version."""
    notes: tuple[str, ...] = ()
    """Why a stored index was not used."""

    @property
    def root(self) -> Path:
        """The folder of the source."""
        return self.source.root

    @property
    def sizes(self) -> np.ndarray:
        """Height and width of every image as it is stored: int64 [images, 2]."""
        return ImageSizes(self.rows)[:]

    def sizes_for(self, recipe: Recipe) -> ImageSizes:
        """Return height and width of every image as a recipe sees it; see `exif_orientation`."""
        return ImageSizes(self.rows, self.orientations if recipe.exif_orientation else None)

    def labels(self, samples: np.ndarray) -> np.ndarray:
        """Return the labels of samples: int64 [N]; -1 for padding, whose sample is -1."""
        return np.where(samples < 0, -1, self.rows["label"][samples]).astype(np.int64)

    def describe_quarantine(self) -> list[dict[str, str]]:
        """Return the bad files and the reasons as plain values; bytes of names that are not UTF-8
        are replaced."""
        return [{"file": printable(bad.file), "reason": bad.reason} for bad in self.quarantined]

    def describe(self) -> dict[str, Any]:
        """Return how many images there are, the folder to which names are relative, and the bad
        ones, as plain values."""
        return {
            "images": len(self),
            "root": printable(name_folder(self.root)),
            "quarantined": self.describe_quarantine(),
        }

    def read(self, sample: int) -> bytes:
        """Return the encoded image.

        Raises `DataError` if it is missing, cannot be read, or has other bytes than were indexed.
        In an index without checksums, the time of its file shows this.
        """
        try:
            is_later, data = self._read(sample)
        except OSError as error:
            if is_failure(error):
                raise self.explain_failure(sample, error) from None
            raise self.explain_change(sample, explain_failure(error)) from None
        except ValueError as error:
            raise self.explain_change(sample, str(error)) from None
        length = self.rows["length"][sample]
        if len(data) != length:
            raise self.explain_change(sample, f"it has {len(data)} bytes instead of {length}")
        if len(self.checksums) and compute_crc(data) != self.checksums[sample]:
            raise self.explain_change(sample, CHANGED)
        if is_later and not len(self.checksums):
            raise self.explain_change(sample, "it was written after indexing")
        return data

    def _read(self, sample: int) -> tuple[bool, bytes]:
        """Return whether the time of an image's file shows a change, and the current bytes of the
        image."""
        if not self.source.files:
            data, time = read_file(self.path(sample))
            return time != self.times[sample], data
        file = int(self.rows["file"][sample])
        is_later = self._places(file).state() != self.states[file]
        return is_later, self.read_encoded(sample)


_CLOCK_STEP_NS = 10_000_000
"""Times of files are behind the clock by up to this much: 4 ms in Linux with 250 ticks a second."""


def open_index(
    where: str | Path | Source,
    *,
    classes: tuple[str, ...] | None = None,
    progress: Progress | None = None,
    anew: bool = False,
) -> Index:
    """Return the index of a source or of all images in a folder. Build it if there is none or the
    images changed.

    These changes are noticed: added and removed files, and size and time of files that hold many
    images. An image file that was overwritten in place is refused when it is read. An image that
    was left out is looked at again if it was written since, or if its file was missing. `anew`
    builds the index in any case.

    Labels are the positions of the classes in `classes`, or in the source's own list. Several
    processes may call this at the same time, also on several machines that share the data; one
    builds the index, the others wait. `progress` is called with the number of images done and of
    all images, also while another process builds. Raises `DataError` if the layout of the images
    does not fit any format, or if the system fails to read one.
    """
    source = where if isinstance(where, Source) else find_source(Path(where))
    _check_folders(source, classes)
    notes: list[str] = []
    index = None if anew else load_index(source, notes)
    if index is None:
        cache = find_cache_folder(source)
        with hold_lock(cache / "indexing.lock", progress) as lock:
            # Another process may have built it in the meantime.
            index = None if anew else load_index(source)
            if index is None:
                stamp = _stamp(source)
                began_ns = time.time_ns() - _CLOCK_STEP_NS
                index = replace(_build(source, lock.tell), notes=tuple(notes))
                _store(index, cache, stamp, began_ns)
    return index if classes is None else relabel_index(index, classes)


def find_index(source: Source, *, classes: tuple[str, ...]) -> Index | None:
    """Return the index of a source as `open_index` does if there is one and the images have not
    changed; otherwise None.

    Nothing is decoded or written. Raises `DataError` if the images have classes that are not in
    `classes`.
    """
    _check_folders(source, classes)
    index = load_index(source)
    return None if index is None else relabel_index(index, classes)


def check_layouts(sources: Iterable[Source]) -> None:
    """Raise `DataError` if class folders of the sources are empty or hold folders. All of them are
    in one message, before an image is decoded."""
    contents = []
    for source in sources:
        if source.format == FOLDER:
            index = load_index(source)
            skipped = list_skipped(list_images(source) if index is None else index)
            contents.append((source.root, skipped))
    check_layout(contents)


def list_skipped(images: Index | Listing) -> tuple[Skipped, ...]:
    """Return what is in a source and not an image of a class, with what is next to class
    folders."""
    beside = list_beside_classes(images.source.root) if images.source.format == FOLDER else ()
    return (*beside, *images.skipped)


def load_index(source: Source, notes: list[str] | None = None) -> Index | None:
    """Return the stored index of a source with its own classes; None if there is none, if the
    images changed, or if it cannot be used: then `notes` get the reason."""
    for folder in _cache_folders(source):
        try:
            index = _load(source, folder)
        except (OSError, ValueError) as error:
            if notes is not None:
                notes.append(f"the index in {folder} is unusable and is rebuilt: {error}")
            continue
        if index is not None:
            return index
    return None


def relabel_index(index: Index, classes: tuple[str, ...], *, is_first: bool = False) -> Index:
    """Return the index with labels that are positions in `classes`, in the order of a listing with
    them. Raises `DataError` if a class is not in `classes`.

    `is_first` says that `classes` were those of the images themselves, not of others.
    """
    if classes == index.classes:
        return index
    moved = relabel(index, classes)
    order = order_as_listed(moved, index.classes, is_first=is_first)
    if order is not None:
        return subset(moved, order)
    return replace(moved, digest=_digest(moved.rows, moved.classes))


def _check_folders(source: Source, classes: tuple[str, ...] | None) -> None:
    """Raise `DataError` if a class folder is not in `classes`. This is checked before all images
    are decoded."""
    if source.format == FOLDER and classes is not None:
        unknown = sorted(set(list_class_folders(source.root)) - set(classes))
        unknown = [name for name in unknown if read_class_folder(source.root, name).files]
        if unknown:
            raise DataError(
                f"{source.title} has classes that the training images do not have:"
                f" {', '.join(unknown[:5])}. Add training images of them, or remove them; if one is"
                " a renamed class, restore its name"
            )


def subset(index: Index, samples: np.ndarray) -> Index:
    """Return the index of some images of another index. `samples` are their numbers in order: int64
    [images]."""
    rows = np.array(index.rows[samples])
    return replace(
        index,
        rows=rows,
        names=Names.of(index.names[i] for i in samples.tolist()),
        times=index.times[samples] if len(index.times) else index.times,
        orientations=index.orientations[samples],
        checksums=index.checksums[samples] if len(index.checksums) else index.checksums,
        digest=_digest(rows, index.classes),
    )


def _stamp(source: Source) -> str:
    """Return a text that changes when an image is added, removed or renamed. For a folder, its own
    time shows this."""
    names = list_class_folders(source.root) if source.format == FOLDER else source.files
    states = [(name, _state(source.root / name)) for name in names]
    lists = [(source.root / name).with_suffix(".lst") for name in source.files]
    states += [(path.name, _state(path)) for path in lists if path.is_file()]
    beside = [
        _hash_contents(source.root / QUARANTINE),
        _hash_contents(source.root / CLASSES),
        _hash_contents(source.root.parent / CLASSES),
    ]
    stamp = json.dumps([VERSION, states, beside], allow_nan=False)
    return hashlib.sha256(stamp.encode()).hexdigest()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return 0 if path.is_dir() else status.st_size, status.st_mtime_ns


def _hash_contents(path: Path) -> str:
    return hashlib.sha256(read_regular(path, RECORDS)).hexdigest() if path.is_file() else ""


def _cache_folders(source: Source) -> tuple[Path, Path]:
    """Return the folders where an index may be: next to the images, and in the user's cache.

    It is not among class folders, since torchvision and Keras take a hidden folder for a class,
    unless the folder is all that is mounted, as in a container.
    """
    root = source.root.resolve()
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    personal = user_cache() / name / source.split
    if source.format == FOLDER and not root.is_mount():
        return root.parent / CACHE / root.name, personal
    return source.root / CACHE / source.split, personal


def find_cache_folder(source: Source) -> Path:
    """Return the folder for what is computed from a source: next to the images, or in the user's
    cache if that is read-only. It is created. Raises `DataError` if neither can be."""
    beside, personal = _cache_folders(source)
    try:
        beside.mkdir(exist_ok=True, parents=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:  # a read-only data set
        pass
    try:
        personal.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the index of {source.root} cannot be written to {beside} or {personal}:"
            f" {error.strerror}. Set XDG_CACHE_HOME to a writable folder"
        ) from None
    return personal


def read_quarantine(source: Source) -> dict[str, str]:
    """Return the images that a source's quarantine leaves out, and why. Raises `DataError` if the
    file is invalid."""
    path = source.root / QUARANTINE
    if not path.is_file():
        return {}
    try:
        images = parsed(read_regular_text(path, RECORDS, errors="surrogateescape"))["images"]
        return {str(place): str(reason) for place, reason in images.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f" ({error})" if isinstance(error, ValueError) else ""
        raise DataError(
            f"{path} is not a quarantine{cause}; expected"
            ' {"images": {"class/image": "reason", ...}}'
        ) from None


def _build(source: Source, progress: Progress) -> Index:
    # Taken before the listing: a file that is written in the meantime is noticed when it is read.
    states = tuple(_state(source.root / name) for name in source.files)
    # Pillow warns about large and odd images. The filters are set here because they are per
    # process, not per thread.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        listing, facts = list_and_inspect(source, read_quarantine(source), progress)
    if not (len(listing) or listing.left_out or listing.damaged) and listing.skipped:
        raise explain_no_images(source.root, listing.skipped)
    bad = facts.bad
    good = np.array([i for i in range(len(listing)) if i not in bad], np.int64)
    if not len(good):
        raise DataError(f"{source.title}: no image can be read{_name_first(listing, bad)}")
    quarantined = [Quarantined(listing.place(i), bad[i]) for i in sorted(bad)]
    quarantined += listing.damaged
    for image in listing.left_out:
        quarantined.append(Quarantined(image.file, f"{LEFT_OUT}{image.reason}"))
    rows = listing.rows[good]
    return Index(
        source,
        rows,
        Names.of(listing.names[i] for i in good.tolist()),
        listing.classes,
        listing.numbered,
        times=facts.times[good] if len(facts.times) else facts.times,
        orientations=facts.orientations[good],
        checksums=facts.checksums[good],
        states=states,
        quarantined=tuple(quarantined),
        skipped=listing.skipped,
        digest=_digest(rows, listing.classes),
    )


def _name_first(listing: Listing, bad: dict[int, str]) -> str:
    """Return the first image that cannot be read, and why, for a message; "" without one."""
    places = [Quarantined(listing.place(i), bad[i]) for i in sorted(bad)[:1]]
    for image in (*places, *listing.damaged)[:1]:
        return f"; the first is {printable(image.file)}: {image.reason}"
    return ""


def _digest(rows: np.ndarray, classes: tuple[str, ...]) -> str:
    digest = hashlib.sha256(json.dumps(classes, allow_nan=False).encode())
    for column in ("label", "length", "height", "width"):
        digest.update(np.ascontiguousarray(rows[column]).data)
    return digest.hexdigest()


def _store(index: Index, cache: Path, stamp: str, began_ns: int) -> None:
    about = {
        "stamp": stamp,
        "began_ns": began_ns,
        "digest": index.digest,
        "classes": index.classes,
        "numbered": index.numbered,
        "states": index.states,
        "quarantined": [[bad.file, bad.reason] for bad in index.quarantined],
        "skipped": index.skipped,
    }
    arrays = {
        "rows": index.rows,
        "names": index.names.text,
        "name_ends": index.names.ends,
        "times": index.times,
        "orientations": index.orientations,
        "checksums": index.checksums,
    }
    write_index(cache, about, arrays)


def _load(source: Source, cache: Path) -> Index | None:
    """Return the index in a folder; None if there is none, or of images that changed. Raises
    `ValueError` and `OSError` if it cannot be used for another reason."""
    folders = set()
    if source.format == FOLDER:
        folders = set(list_class_folders(source.root))
    states = [_state(source.root / name) for name in source.files]
    files = read_index(cache, _stamp(source), source.format, folders, states)
    if files is None:
        return None
    about, arrays = files
    quarantined = tuple(Quarantined(file, reason) for file, reason in about["quarantined"])
    since = about.get("began_ns")
    if since is None:  # an index of an older version
        since = (cache / DESCRIPTION).stat().st_ctime_ns
    if any(is_usable(source, bad, since) for bad in quarantined):
        return None
    if _digest(arrays["rows"], about["classes"]) != about["digest"]:
        raise ValueError("the digest does not match the images")
    return Index(
        source,
        arrays["rows"],
        Names(arrays["names"], arrays["name_ends"]),
        tuple(about["classes"]),
        about["numbered"],
        times=arrays["times"],
        orientations=arrays["orientations"],
        checksums=arrays["checksums"],
        states=tuple(states),
        quarantined=quarantined,
        skipped=tuple(Skipped(*item) for item in about["skipped"]),
        digest=about["digest"],
    )
