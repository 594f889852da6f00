"""Write files completely or not at all: first under a temporary name that no reader mistakes for
the file."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lockstep.system.strict_json import to_json


@contextmanager
def replacing(path: Path, *, is_flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write a file to. When the block ends, the file replaces `path`.

    After an error in the block `path` is unchanged. With `is_flushed`, the file is on disk when the
    block ends. Without it, writing many small files is much faster; use that for files that can be
    made again.
    """
    partial = path.with_name(f".{path.name}.partial")
    if partial.is_symlink() or partial.is_fifo():  # planted: writing would follow it, or wait
        partial.unlink()
    try:
        yield partial
        if is_flushed:
            flush(partial)
        partial.replace(path)
        if is_flushed:
            flush(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file, as `replacing` does. `path` must not exist; after an
    error it does not."""
    try:
        with replacing(path) as partial:
            yield partial
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


@contextmanager
def appearing_folder(path: Path) -> Iterator[Path]:
    """Yield the path of a folder to make and fill. When the block ends, it gets the name `path`,
    which must not exist.

    It is made in a new hidden folder next to `path`, so that no other folder or process interferes.
    An error in the block leaves nothing behind. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(
        tempfile.mkdtemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    )  # of at most 255 bytes
    try:
        # The hidden folder is open to its owner only; a folder inside has the usual permissions.
        yield hidden / path.name
        (hidden / path.name).rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def staging(path: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to `path`, for files that are to appear together with
    `give_names`.

    Its name follows from that of `path`, so that what a killed process left there is found and
    removed, with the names that the process had given, unless it had given all of them. Missing
    parents of `path` are made; those that stay empty are removed. Raises `OSError`, also if another
    process is staging the same path.
    """
    parents = [parent for parent in path.parents if not parent.exists()]
    folder = path.with_name(f".{path.name}.unfinished")
    try:
        with _hold(folder):
            _clear(folder)
            try:
                yield folder
            finally:
                _clear(folder)
                folder.rmdir()
    finally:
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def own_folder(folder: Path) -> Iterator[int]:
    """Make a folder, or an existing one, open to this user only. Yield a descriptor of it. Raises
    `OSError`, also if it is a link or belongs to another user."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():  # the superuser can open all
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder: those that hold it too, and other users."""
    with own_folder(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None
        except OSError:  # a file system without locks
            pass
        yield


def _clear(folder: Path) -> None:
    """Empty a folder of `staging`. If only some of its entries were given their names, take these
    names back."""
    entries = list(folder.iterdir())
    named = [folder.parent / entry.name for entry in entries if _is_named(entry)]
    if len(named) < len(entries):
        for path in named:
            path.unlink()
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_named(entry: Path) -> bool:
    path = entry.parent.parent / entry.name
    return path.exists() and path.samefile(entry)


def give_names(folder: Path, names: Sequence[str]) -> None:
    """Give entries of a folder of `staging` their names next to it, in this order. Remove its other
    entries.

    If the process is killed in between, the first names exist without the others, until the path is
    staged again. Raises `OSError`, for example if a name is taken; then `staging` takes back those
    that were given.
    """
    for entry in folder.iterdir():
        if entry.name not in names:
            entry.unlink()
    for name in names:
        path = folder.parent / name
        try:
            os.link(
                folder / name, path
            )  # a link shows afterwards who gave the name, and never replaces a file
        except FileExistsError:
            raise
        except OSError:  # a folder, or a file system without links
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            (folder / name).rename(path)
    flush(folder.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk. Some file systems cannot do that
    for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes, *, is_flushed: bool = True) -> None:
    """Write a file. A reader never sees a partial file."""
    with replacing(path, is_flushed=is_flushed) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8. A reader never sees a partial file."""
    write_bytes(path, text.encode())


def lines(names: Sequence[str]) -> str:
    r"""Return names as the text of a file: one on each line.

    >>> lines(["ant", "bee"])
    'ant\nbee\n'
    """
    return "".join(f"{name}\n" for name in names)


def write_lines(path: Path, names: Sequence[str]) -> None:
    """Write names into a folder that has no readers yet, one on each line, in UTF-8; nothing if
    there are none."""
    if names:
        path.write_text(lines(names), encoding="utf-8")


@contextmanager
def written_text(path: Path) -> Iterator[TextIO]:
    """Yield a text file that gets its name when it is complete. Names of files are written byte for
    byte."""
    with (
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as file,
    ):
        yield file


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON that any parser reads (see `lockstep.system.strict_json`),
    completely or not at all."""
    write_text(path, to_json(value, indent=1) + "\n")


def user_cache() -> Path:
    """Return the folder of the user's cache that Lockstep writes to. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the name of a file to the system's errors; errors of open files do not have it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
