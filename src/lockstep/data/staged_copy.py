"""Copy a data set to a disk of this machine, so that training does not read it from a network file
system.

Names, bytes and times stay the same: the copy has the same index as the original, and a run resumes
with either.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lockstep.data.images import Progress
from lockstep.data.index import open_index
from lockstep.data.sources import CACHE, find_sources
from lockstep.system.errors import DataError
from lockstep.system.files import replacing
from lockstep.system.locks import hold_lock
from lockstep.system.regular_files import ANY_SIZE, open_regular

_PART = 2**20
_THREADS = 16
"""Files that are copied at the same time: a network file system answers many requests faster than
one after the other."""
_NOT_COPIED = ("indexing.lock", "staging.lock", "pack.lock")


@dataclass(frozen=True)
class _File:
    name: str
    """Relative to the folder."""
    length: int
    time_ns: int


@dataclass(frozen=True)
class Staged:
    """What was copied."""

    files: int
    """Files of the data set."""
    copied: int
    """Those that were missing in the target, or differed from it in length or time."""
    copied_bytes: int


def stage(data: Path, target: Path, progress: Progress | None = None) -> Staged:
    """Copy a data set to `target`, with its index. What is there already is not copied again.

    Several processes may call this at the same time: one copies, the others wait. Machines copy in
    different orders, so that they do not all read the same file at once. `progress` is called with
    the bytes done and all bytes.

    Raises `DataError` if the target holds other files, has not enough space, or if the data set
    changes meanwhile.
    """
    digests = _digests(data)
    _refuse_overlap(data, target)
    try:
        files = list(_files(data))
        folders = {Path(file.name).parent for file in files}
        times = {folder: (data / folder).stat().st_mtime_ns for folder in folders}
        (target / CACHE).mkdir(parents=True, exist_ok=True)
        with hold_lock(target / CACHE / "staging.lock", progress) as lock:
            _refuse_other_files(target, files)
            missing = [file for file in files if not _is_there(target, file)]
            total = sum(file.length for file in missing)
            _check_space(target, total)
            for done in _copy_files(data, target, missing):
                lock.tell(done, max(total, 1))  # the only missing file can be empty
            # By these an index notices images that were added. The deepest folders come first,
            # since writing changes times.
            for folder in sorted(times, reverse=True):
                os.utime(target / folder, ns=(times[folder],) * 2)
    except OSError as error:
        raise DataError(
            f"{data} cannot be copied to {target}: {error.strerror}: {error.filename}"
        ) from None
    if digests != _digests(target):
        raise DataError(
            f"{target} does not hold the images of {data}, which has changed meanwhile; copy it"
            " again"
        )
    return Staged(len(files), len(missing), total)


def _digests(data: Path) -> dict[str, str]:
    """Return the digest of every split, by which a run knows its images."""
    return {split: open_index(source).digest for split, source in find_sources(data).items()}


def _refuse_overlap(data: Path, target: Path) -> None:
    inner = target.resolve()
    outer = data.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise DataError(
            f"{target} and {data} are the same folder, or one is in the other; choose another --to"
        )


def _files(data: Path) -> Iterator[_File]:
    """Yield all files below a folder, in order. Links to files and folders are followed."""
    for folder, folders, names in os.walk(data, followlinks=True):
        folders.sort()
        if len(Path(folder).relative_to(data).parts) > 40:
            raise DataError(
                f"{folder} is nested too deep; a link in it may lead to a folder around it"
            )
        for name in sorted(names):
            if name in _NOT_COPIED:
                continue
            path = Path(folder) / name
            status = path.stat()
            yield _File(str(path.relative_to(data)), status.st_size, status.st_mtime_ns)


def _refuse_other_files(target: Path, files: list[_File]) -> None:
    """Raise `DataError` if the target has files that are not of the data set: they could be taken
    for images."""
    known = {file.name for file in files}
    for file in _files(target):
        is_hidden = any(part.startswith(".") for part in Path(file.name).parts)
        if file.name not in known and not is_hidden:
            raise DataError(
                f"{target} holds {file.name}, which is not in the data set; remove it, or choose"
                " another --to"
            )


def _is_there(target: Path, file: _File) -> bool:
    try:
        status = (target / file.name).stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.length, file.time_ns)


def _check_space(target: Path, missing: int) -> None:
    free = shutil.disk_usage(target).free
    if missing > free:
        raise DataError(
            f"{target} has {free / 1e9:.1f} GB free, but the copy needs {missing / 1e9:.1f} GB;"
            " free space"
        )


def _rotate(files: list[_File]) -> list[_File]:
    """Return the files in an order that begins elsewhere on every machine."""
    if not files:
        return files
    digest = hashlib.sha256(socket.gethostname().encode()).digest()
    place = int.from_bytes(digest[:8], "big") % len(files)
    return files[place:] + files[:place]


def _copy_files(data: Path, target: Path, files: list[_File]) -> Iterator[int]:
    """Copy files; yield the number of bytes that are done after each."""

    def copy(file: _File) -> int:
        return _copy(data, target, file)

    with (
        ThreadPoolExecutor(_THREADS) as pool,
        closing(pool.map(copy, _rotate(files))) as lengths,  # type: ignore[type-var]
    ):
        yield from accumulate(lengths)


def _copy(data: Path, target: Path, file: _File) -> int:
    path = target / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, is_flushed=False) as partial:
        with open_regular(data / file.name, ANY_SIZE) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy, _PART)
        os.utime(partial, ns=(file.time_ns, file.time_ns))
        if partial.stat().st_size != file.length:
            raise DataError(f"{data / file.name} has changed while it was copied; copy it again")
    return file.length
