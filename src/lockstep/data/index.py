"""The index of a data set: for every good image its file, place, label and size; and the list of the bad ones.

Built once by decoding every image, kept beside the data (or in the user's cache, where the data is read-only) and mapped
into memory. A row is 24 bytes and a file name its own length, whatever the number of images.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.decode import check
from lockstep.errors import DataError
from lockstep.machine import cores

VERSION = 1
ROW = np.dtype(
    [("offset", "<i8"), ("file", "<u4"), ("length", "<u4"), ("label", "<i4"), ("height", "<u2"), ("width", "<u2")]
)
_ARRAYS = {"rows": ROW, "names": np.dtype("u1"), "name_ends": np.dtype("<i8")}
"""The files of an index, one array each."""
Progress = Callable[[int, int], None]
"""Called with the images done and the images in all."""


@dataclass(frozen=True)
class Quarantined:
    """An image that cannot be used, and why."""

    file: str
    reason: str


@dataclass(frozen=True)
class Index:
    """Every usable image under `root`, in a fixed order."""

    root: Path
    rows: np.ndarray
    """[images] of `ROW`: byte offset and length in the file, file number, label, height and width in pixels."""
    names: np.ndarray
    """uint8: the files' paths relative to `root`, one after the other, as the file system spells them."""
    name_ends: np.ndarray
    """int64 [files]: where each path ends in `names`."""
    classes: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    digest: str
    """SHA-256 of rows, names and classes: two runs with one digest see the same images."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> np.ndarray:
        """Height and width of every image: int64 [images, 2]."""
        return np.stack([self.rows["height"], self.rows["width"]], axis=1).astype(np.int64)

    def listed_quarantine(self) -> list[dict[str, str]]:
        """Return the bad files and the reasons as plain values; what is not UTF-8 in a name is replaced."""
        return [{"file": os.fsencode(bad.file).decode(errors="replace"), "reason": bad.reason} for bad in self.quarantined]

    def path(self, sample: int) -> Path:
        """Return the file that holds a sample."""
        file = int(self.rows["file"][sample])
        start = int(self.name_ends[file - 1]) if file else 0
        return self.root / os.fsdecode(self.names[start : int(self.name_ends[file])].tobytes())

    def read(self, sample: int) -> bytes:
        """Return the encoded image.

        Raises `DataError` if the file is gone or no longer as long as it was.
        """
        row = self.rows[sample]
        try:
            with self.path(sample).open("rb") as file:
                file.seek(int(row["offset"]))
                data = file.read()
        except OSError as error:
            raise self.changed(sample, str(error.strerror)) from None
        if len(data) != row["length"]:
            raise self.changed(sample, f"it has {len(data)} bytes instead of {row['length']}")
        return data

    def changed(self, sample: int, how: str) -> DataError:
        """Return the error that says how a file differs from what was indexed, and what to do."""
        return DataError(
            f"{self.path(sample)} is not the image that was indexed: {how}. "
            f"Put it back, or delete {_cache_folder(self.root)} to index the images again."
        )


CACHE = ".lockstep"


def open_index(root: str | Path, *, classes: tuple[str, ...] | None = None, progress: Progress | None = None) -> Index:
    """Return the index of an image folder `root/<class>/<image>`, building it if there is none or the folder changed.

    An image written over in place does not change its folder; `Index.read` and the loader refuse one of another length or
    size. Labels are the positions of the class folders in `classes`, or in their own sorted list. Several processes may call
    this at once; one builds, the others wait. Raises `DataError` if the folder is not laid out so, or a class holds no file.
    """
    root = Path(root)
    found = class_folders(root)
    classes = _checked_classes(root, found, classes)
    stamp = _stamp(root, found, classes)
    cache = _cache_folder(root)
    with _locked(cache / "lock"):
        index = _load(root, cache, stamp)
        if index is None:
            index = _build(root, found, classes, progress)
            _store(index, cache, stamp)
    return index


def class_folders(root: Path) -> list[str]:
    """Return the sorted names of the class folders.

    Raises `DataError` if there are none, and says how to sort a flat folder of images.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected images in {root}/<class>/<image>")
    with os.scandir(root) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in visible if entry.is_dir())
    if not folders:
        files = sum(entry.is_file() for entry in visible)
        found = f"{files} files and no folders" if files else "nothing"
        raise DataError(
            f"{root} holds {found}; expected one folder for each class with its images inside. "
            "ImageNet's validation images must first be sorted into their classes."
        )
    return folders


def _checked_classes(root: Path, found: list[str], classes: tuple[str, ...] | None) -> tuple[str, ...]:
    if classes is None:
        return tuple(found)
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(f"{root} has class folders that training has not: {', '.join(unknown[:5])}")
    return classes


def _stamp(root: Path, found: list[str], classes: tuple[str, ...]) -> str:
    """Return a text that changes when an image is added, removed or renamed (a folder's own time changes with it)."""
    times = [(name, (root / name).stat().st_mtime_ns) for name in found]
    return hashlib.sha256(json.dumps([VERSION, times, classes]).encode()).hexdigest()


def _cache_folder(root: Path) -> Path:
    beside = root / CACHE
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:  # a read-only data set
        pass
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "lockstep" / hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the index of {root} can be written neither to {beside} nor to {folder}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a folder for it."
        ) from None
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(root: Path, found: list[str], classes: tuple[str, ...], progress: Progress | None) -> Index:
    label_of = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    for name in found:
        for file in _files(root / name):
            files.append(f"{name}/{file}")
            labels.append(label_of[name])
    rows, bad = _inspected(root, files, progress)
    rows["label"] = labels
    good = np.array([i for i in range(len(files)) if i not in bad], np.int64)
    if not len(good):
        raise DataError(f"{root}: none of {len(files)} files is an image that can be read")
    rows = rows[good]
    rows["file"] = np.arange(len(good))
    encoded = [os.fsencode(files[i]) for i in good]
    quarantined = tuple(Quarantined(files[i], bad[i]) for i in sorted(bad))
    names = np.frombuffer(b"".join(encoded), np.uint8)
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Index(root, rows, names, ends, classes, quarantined, _digest(rows, names, ends, classes))


def _inspected(root: Path, files: list[str], progress: Progress | None) -> tuple[np.ndarray, dict[int, str]]:
    """Decode all files; return rows of `ROW` with length, height and width, and why bad files are bad."""
    rows = np.zeros(len(files), ROW)
    bad: dict[int, str] = {}

    def inspect(some: range) -> int:
        for i in some:
            try:
                data = (root / files[i]).read_bytes()
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
    tasks = [range(first, min(first + 64, len(files))) for first in range(0, len(files), 64)]
    # Closed before the pool: an interruption does not wait for the tasks that have not begun.
    with ThreadPoolExecutor(cores()) as pool, closing(pool.map(inspect, tasks)) as inspected:  # type: ignore[type-var]
        for done in inspected:
            if progress is not None:
                progress(done, len(files))
    return rows, bad


def _files(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in visible if entry.is_dir())
    if folders:
        raise DataError(f"{folder} holds a folder, {folders[0]}; expected images in {folder.parent}/<class>/<image>")
    if not visible:
        raise DataError(f"{folder} is empty; expected the images of a class. Remove the folder if there are none")
    return sorted(entry.name for entry in visible)


def _digest(rows: np.ndarray, names: np.ndarray, ends: np.ndarray, classes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for array in (rows, names, ends):
        digest.update(array.data)
    digest.update(json.dumps(classes).encode())
    return digest.hexdigest()


def _store(index: Index, cache: Path, stamp: str) -> None:
    for name, dtype in _ARRAYS.items():
        temporary = cache / f"{name}.tmp"
        getattr(index, name).astype(dtype).tofile(temporary)
        temporary.replace(cache / name)
    about = {
        "stamp": stamp,
        "digest": index.digest,
        "classes": index.classes,
        "quarantined": [[bad.file, bad.reason] for bad in index.quarantined],
    }
    temporary = cache / "index.json.tmp"
    temporary.write_text(json.dumps(about, indent=1), encoding="utf-8")
    temporary.replace(cache / "index.json")


def _load(root: Path, cache: Path, stamp: str) -> Index | None:
    try:
        about = json.loads((cache / "index.json").read_text(encoding="utf-8"))
        if about["stamp"] != stamp:
            return None
        rows, names, ends = (np.memmap(cache / name, dtype, "r") for name, dtype in _ARRAYS.items())
        classes = tuple(about["classes"])
        # Files that a killed process or a full disk left behind do not fit together.
        if _digest(rows, names, ends, classes) != about["digest"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    quarantined = tuple(Quarantined(file, reason) for file, reason in about["quarantined"])
    return Index(root, rows, names, ends, classes, quarantined, about["digest"])
