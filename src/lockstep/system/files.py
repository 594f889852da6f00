"""Writing files whole or not at all: under another name first, which a reader never takes for the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.system.strict_json import to_json


@contextmanager
def replacing(path: Path, *, is_flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write a file to. When the block ends, the file takes the place of `path`.

    After an error `path` is what it was before. `is_flushed`: the file is on the disk when the block ends; many small files
    that can be made again are written much faster without.
    """
    partial = path.with_name(f".{path.name}.partial")
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
    """Yield a temporary path to write a new file to, as `replacing` does; after an error there is no file `path` either."""
    try:
        with replacing(path) as partial:
            yield partial
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes, *, is_flushed: bool = True) -> None:
    """Write a file that is never seen half-written."""
    with replacing(path, is_flushed=is_flushed) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 that is never seen half-written."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON that any parser reads (see `lockstep.system.strict_json`), never half-written."""
    write_text(path, to_json(value, indent=1) + "\n")
