"""The index of a split: for every good image its place, label, size and name; and the list of the bad ones.

Built once by decoding every image, kept beside the data (or in the user's cache, where the data is read-only) and mapped
into memory. It takes 32 bytes an image and its name, whatever the storage format.
"""

import fcntl
import hashlib
import json
import os
import shlex
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.data.decoding.decode import check
from lockstep.data.listing import (
    CLASSES,
    ROW,
    Images,
    Listing,
    Names,
    Progress,
    Quarantined,
    list_images,
    printable,
    read_file,
    relabelled,
)
from lockstep.data.sources import FOLDER, Source, class_folders, find_source
from lockstep.system.errors import DataError
from lockstep.system.files import replacing, write_text
from lockstep.system.machine import cores

VERSION = 3
CACHE = ".lockstep"
QUARANTINE = "quarantine.json"
"""Beside class folders or files: images to leave out, {"images": {"class/image" or "file@first byte": reason}}."""
_ARRAYS = {"rows": ROW, "names": np.dtype("u1"), "name_ends": np.dtype("<u4"), "times": np.dtype("<u4")}
"""The files of an index, one array each."""


@dataclass(frozen=True)
class Index(Images):
    """Every usable image of a source."""

    times: np.ndarray
    """uint32: in an image folder, when each file was last written, in microseconds modulo 2**32; otherwise empty."""
    states: tuple[tuple[int, int], ...]
    """Size and time of every file that holds many images, as they were when it was listed."""
    quarantined: tuple[Quarantined, ...]
    digest: str
    """SHA-256 of labels, lengths, sizes and classes: one for the same images in the same order, whatever holds them."""

    @property
    def root(self) -> Path:
        """The folder of the source."""
        return self.source.root

    @property
    def sizes(self) -> np.ndarray:
        """Height and width of every image: int64 [images, 2]."""
        return np.stack([self.rows["height"], self.rows["width"]], axis=1).astype(np.int64)

    def labels(self, samples: np.ndarray) -> np.ndarray:
        """Return the labels of samples: int64 [N]; -1 of padding, whose sample is -1."""
        return np.where(samples < 0, -1, self.rows["label"][samples]).astype(np.int64)

    def listed_quarantine(self) -> list[dict[str, str]]:
        """Return the bad files and the reasons as plain values; what is not UTF-8 in a name is replaced."""
        return [{"file": printable(bad.file), "reason": bad.reason} for bad in self.quarantined]

    def read(self, sample: int) -> bytes:
        """Return the encoded image.

        Raises `DataError` if its file is gone, or is no longer the one that was indexed.
        """
        try:
            if self.source.format != FOLDER:
                file = int(self.rows["file"][sample])
                if self._places(file).state() != self.states[file]:
                    raise self.changed(sample, "its file was written since")
                return self.encoded(sample)
            data, time = read_file(self.path(sample))
        except OSError as error:
            raise self.changed(sample, str(error.strerror)) from None
        except ValueError as error:
            raise self.changed(sample, str(error)) from None
        if len(data) != self.rows["length"][sample]:
            raise self.changed(sample, f"it has {len(data)} bytes instead of {self.rows['length'][sample]}")
        if time != self.times[sample]:
            raise self.changed(sample, "it was written since")
        return data

    def changed(self, sample: int, how: str) -> DataError:
        """Return the error that says how a file differs from what was indexed, and what to do."""
        name = "" if self.source.format == FOLDER else f" ({self.name(sample)})"
        return DataError(
            f"{self.root}/{self.place(sample)}{name} is not the image that was indexed: {how}. "
            f"Put it back, or index the images again: lockstep data index {shlex.quote(str(self.root))}"
        )


def open_index(
    where: str | Path | Source,
    *,
    classes: tuple[str, ...] | None = None,
    progress: Progress | None = None,
    anew: bool = False,
) -> Index:
    """Return the index of a source or of all images in a folder, building it if there is none or the images changed.

    Noticed are files that came or went and, of files that hold many images, sizes and times; an image file written over in
    place is refused when it is read. `anew` builds it in any case. Labels are the positions of the classes in `classes`, or
    in the source's own list. Several processes may call this at once; one builds, the others wait. `progress` is called with
    the images done and the images in all. Raises `DataError` if the images are not laid out as one of the formats asks.
    """
    source = where if isinstance(where, Source) else find_source(Path(where))
    _check_folders(source, classes)
    index = None if anew else next(filter(None, (_load(source, folder) for folder in _cache_folders(source))), None)
    if index is None:
        cache = _writable_folder(source)
        with _locked(cache / "lock"):
            # Another process may have built it meanwhile.
            index = None if anew else _load(source, cache)
            if index is None:
                stamp = _stamp(source)
                index = _build(source, progress)
                _store(index, cache, stamp)
    return index if classes is None else _of_classes(index, classes)


def stored_index(source: Source, *, classes: tuple[str, ...]) -> Index | None:
    """Return the index of a source as `open_index` does, if there is one and the images are still those; None otherwise.

    Decodes and writes nothing. Raises `DataError` if the images have classes that are not among `classes`.
    """
    _check_folders(source, classes)
    index = next(filter(None, (_load(source, folder) for folder in _cache_folders(source))), None)
    return index if index is None else _of_classes(index, classes)


def _of_classes(index: Index, classes: tuple[str, ...]) -> Index:
    if classes == index.classes:
        return index
    index = relabelled(index, classes)
    return replace(index, digest=_digest(index.rows, index.classes))


def _check_folders(source: Source, classes: tuple[str, ...] | None) -> None:
    """Raise `DataError` if a folder of a class is not among the classes, before all images are decoded."""
    if source.format == FOLDER and classes is not None:
        unknown = sorted(set(class_folders(source.root)) - set(classes))
        if unknown:
            raise DataError(f"{source.named} has classes that training has not: {', '.join(unknown[:5])}")


def subset(index: Index, samples: np.ndarray) -> Index:
    """Return the index of some images of another, in the order of their numbers: int64 [images]."""
    rows = np.array(index.rows[samples])
    return replace(
        index,
        rows=rows,
        names=Names.of(index.names[i] for i in samples.tolist()),
        times=index.times[samples] if len(index.times) else index.times,
        digest=_digest(rows, index.classes),
    )


def _stamp(source: Source) -> str:
    """Return a text that changes when an image is added, removed or renamed (a folder's own time changes with it)."""
    names = class_folders(source.root) if source.format == FOLDER else source.files
    states = [(name, _state(source.root / name)) for name in names]
    lists = [(source.root / name).with_suffix(".lst") for name in source.files]
    states += [(path.name, _state(path)) for path in lists if path.is_file()]
    beside = [_contents(source.root / QUARANTINE)]
    beside += [_contents(folder / CLASSES) for folder in (source.root, source.root.parent)]
    return hashlib.sha256(json.dumps([VERSION, states, beside], allow_nan=False).encode()).hexdigest()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return 0 if path.is_dir() else status.st_size, status.st_mtime_ns


def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _cache_folders(source: Source) -> tuple[Path, Path]:
    """Return where an index may be: beside the images, and in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(source.root.resolve()).encode()).hexdigest()[:16]
    return source.root / CACHE / source.split, home / "lockstep" / name / source.split


def _writable_folder(source: Source) -> Path:
    beside, of_user = _cache_folders(source)
    try:
        beside.mkdir(exist_ok=True, parents=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:  # a read-only data set
        pass
    try:
        of_user.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the index of {source.root} can be written neither to {beside} nor to {of_user}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a folder for it."
        ) from None
    return of_user


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def quarantine_of(source: Source) -> dict[str, str]:
    """Return the images that the quarantine beside a source leaves out, and why. Raises `DataError` if it is no list."""
    path = source.root / QUARANTINE
    if not path.is_file():
        return {}
    try:
        images = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))["images"]
        return {str(place): str(reason) for place, reason in images.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f'{path} is no quarantine; expected {{"images": {{"class/image": "reason", ...}}}}') from None


def _build(source: Source, progress: Progress | None) -> Index:
    # Before they are listed: what is written meanwhile is noticed when it is read.
    states = tuple(_state(source.root / name) for name in source.files)
    listing = list_images(source, quarantine=quarantine_of(source), progress=progress)
    # Pillow warns of large and odd images. The filters belong to the process: threads cannot have their own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times, bad = _inspected(listing, progress)
    good = np.array([i for i in range(len(listing)) if i not in bad], np.int64)
    if not len(good):
        raise DataError(f"{source.named}: none of {len(listing) + len(listing.left_out) or 'its'} images can be read")
    return Index(
        source,
        rows := listing.rows[good],
        Names.of(listing.names[i] for i in good.tolist()),
        listing.classes,
        listing.numbered,
        times=times[good] if len(times) else times,
        states=states,
        quarantined=(
            *(Quarantined(listing.place(i), bad[i]) for i in sorted(bad)),
            *listing.damaged,
            *(Quarantined(each.file, f"left out by {QUARANTINE}: {each.reason}") for each in listing.left_out),
        ),
        digest=_digest(rows, listing.classes),
    )


def _inspected(listing: Listing, progress: Progress | None) -> tuple[np.ndarray, dict[int, str]]:
    """Decode all images and fill in height, width and length; return times, and why bad images are bad."""
    rows, is_folder = listing.rows, listing.source.format == FOLDER
    times = np.zeros(len(rows) if is_folder else 0, np.uint32)
    bad: dict[int, str] = {}

    def inspect(some: range) -> int:
        for i in some:
            try:
                if is_folder:
                    data, times[i] = read_file(listing.path(i))
                else:
                    data = listing.encoded(i)
                height, width = check(data)
                if max(height, width) > np.iinfo(np.uint16).max:
                    raise ValueError(f"{width} x {height} pixels are too many")
            except OSError as error:
                bad[i] = str(error.strerror)
            except ValueError as error:
                bad[i] = str(error)
            else:
                rows[["length", "height", "width"]][i] = (len(data), height, width)
        return some.stop

    # A task for each image would take 2 GB for ImageNet.
    tasks = [range(first, min(first + 64, len(rows))) for first in range(0, len(rows), 64)]
    # Closed before the pool: an interruption does not wait for the tasks that have not begun.
    with ThreadPoolExecutor(cores()) as pool, closing(pool.map(inspect, tasks)) as inspected:  # type: ignore[type-var]
        for done in inspected:
            if progress is not None:
                progress(done, len(rows))
    return times, bad


def _digest(rows: np.ndarray, classes: tuple[str, ...]) -> str:
    digest = hashlib.sha256(json.dumps(classes, allow_nan=False).encode())
    for column in ("label", "length", "height", "width"):
        digest.update(np.ascontiguousarray(rows[column]).data)
    return digest.hexdigest()


def _arrays(index: Index) -> dict[str, np.ndarray]:
    return {"rows": index.rows, "names": index.names.text, "name_ends": index.names.ends, "times": index.times}


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(array.data)
    return digest.hexdigest()


def _store(index: Index, cache: Path, stamp: str) -> None:
    arrays = {name: np.ascontiguousarray(array, _ARRAYS[name]) for name, array in _arrays(index).items()}
    for name, array in arrays.items():
        with replacing(cache / name) as partial:
            array.tofile(partial)
    about = {
        "stamp": stamp,
        "digest": index.digest,
        "checksum": _checksum(arrays),
        "classes": index.classes,
        "numbered": index.numbered,
        "states": index.states,
        "quarantined": [[bad.file, bad.reason] for bad in index.quarantined],
    }
    write_text(cache / "index.json", json.dumps(about, indent=1, allow_nan=False))


def _load(source: Source, cache: Path) -> Index | None:
    try:
        about = json.loads((cache / "index.json").read_text(encoding="utf-8"))
        if about["stamp"] != _stamp(source):
            return None
        arrays = {name: _mapped(cache / name, dtype) for name, dtype in _ARRAYS.items()}
        # Files that a killed process or a full disk left behind do not fit together.
        if _checksum(arrays) != about["checksum"]:
            return None
        quarantined = tuple(Quarantined(file, reason) for file, reason in about["quarantined"])
        names, classes = Names(arrays["names"], arrays["name_ends"]), tuple(about["classes"])
        states = tuple((size, time) for size, time in about["states"])
        return Index(
            source,
            arrays["rows"],
            names,
            classes,
            about["numbered"],
            times=arrays["times"],
            states=states,
            quarantined=quarantined,
            digest=about["digest"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # Nothing cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
