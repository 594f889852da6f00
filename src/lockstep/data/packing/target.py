"""The folder that a pack is written to: held by one process, and noted so that only the same pack
resumes in it."""

import errno
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lockstep.data.listing import Listing
from lockstep.data.sources import CACHE, FOLDER, UNFINISHED
from lockstep.system.errors import DataError
from lockstep.system.files import lines, naming, written_text
from lockstep.system.npz import NUMBERS, read_npy
from lockstep.system.regular_files import RECORDS, TEXT, read_regular

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a user's quota, and the largest size of a file."""
_ABOUT = "pack.json"
"""The file that says what is packed, in the folder `CACHE`."""


@contextmanager
def explain_full_disk(target: Path) -> Iterator[None]:
    """Raise `DataError` with what to do if the block fails because there is no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DataError(
            f"{error.filename or target}: {error.strerror}. Finished and unfinished files stay in"
            f" {target}. Free space and run the same command again to resume, or remove the folder"
        ) from None


def write_classes(path: Path, classes: Sequence[str]) -> None:
    """Write the list of classes, unless it is there."""
    text = lines(classes)
    if not path.exists() or read_regular(path, RECORDS) != text.encode("utf-8", "surrogateescape"):
        with written_text(path) as file:
            file.write(text)


def read_states(listing: Listing) -> np.ndarray:
    """Return length and time of each file that a listing names: int64 [files, 2]."""
    files: Iterable[str] = listing.source.files
    if listing.source.format == FOLDER:
        files = map(listing.name, range(len(listing)))
    return list_states(f"{listing.source.root}/{file}" for file in files)


def list_states(files: Iterable[str]) -> np.ndarray:
    """Return length and time of each file: int64 [files, 2]."""
    return np.array(list(map(_state, files)), np.int64).reshape(-1, 2)


def _state(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)  # noqa: PTH116 - a Path for each image is slower
    except OSError:  # reported later, when it is read
        return 0, 0
    return status.st_size, status.st_mtime_ns


def check_is_own(target: Path) -> None:
    """Raise `DataError` if a folder holds anything but a pack."""
    if not target.is_dir() or (target / CACHE / _ABOUT).exists():
        return
    strange = [path.name for path in target.iterdir() if path.name != CACHE]
    if strange:
        raise DataError(
            f"{target} holds other files ({sorted(strange)[0]}); choose an empty folder"
        )


@contextmanager
def lock_target(target: Path, identity: str, states: np.ndarray) -> Iterator[None]:
    """Lock the target for one pack. Raises `DataError` if it has other files, or if another process
    writes to it."""
    target.mkdir(parents=True, exist_ok=True)
    cache = target / CACHE
    unfinished = target / UNFINISHED
    about = cache / _ABOUT
    states_before = cache / "pack.states.npy"
    check_is_own(target)
    cache.mkdir(exist_ok=True)
    with (cache / "pack.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is writing to {target}") from None
        if not about.exists():
            unfinished.touch()
            _save_states(states_before, states)
            with written_text(about) as note:
                note.write(identity)
        else:
            _check_same(
                target, read_regular(about, TEXT), _load_states(states_before), identity, states
            )
        yield
        unfinished.unlink(missing_ok=True)


def _check_same(
    target: Path, note: bytes, before: np.ndarray | None, identity: str, states: np.ndarray
) -> None:
    """Raise `DataError` unless the target was begun with the same images and options."""
    note = note.strip(b"\0")
    if not note or before is None:
        raise DataError(
            f"{target} lost the record of what was packed; remove it, or choose an empty folder"
        )
    if note != identity.encode():
        raise DataError(
            f"{target} holds other images, or was begun with other options; choose an empty folder"
        )
    # A file that could not be read then (0, 0) may be readable now.
    if before.shape != states.shape or (before != states)[before.any(axis=1)].any():
        raise DataError(
            f"some images have changed since the pack to {target} began; choose an empty folder"
        )


def _save_states(path: Path, states: np.ndarray) -> None:
    # Through memory: if NumPy 2.4 writes to a file, it does not report a full disk at the end of
    # the file.
    memory = io.BytesIO()
    np.save(memory, states)
    with naming(path):
        path.write_bytes(memory.getbuffer())


def _load_states(path: Path) -> np.ndarray | None:
    """Return the saved states, or None if they are missing or incomplete."""
    try:
        states = read_npy(path.name, read_regular(path, RECORDS), NUMBERS)
    except (FileNotFoundError, ValueError):
        return None
    return states if states.ndim == 2 else None
