"""Unpack compressed tars and TFRecords into files that are read as they are."""

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.data.forms import Form, name_split
from lockstep.system.errors import DataError
from lockstep.system.files import naming, replacing
from lockstep.system.regular_files import ANY_SIZE, open_regular

_OPEN: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZ": bz2.open,
    b"\xfd7": lzma.open,
}
"""By the first bytes of a file: what reads it."""
_PART = 2**20


def unpack(form: Form, folder: Path) -> None:
    """Unpack the files of a data set into `folder`, unless they are there: then their checksums
    were right. Raises `DataError` if one is damaged."""
    for path in form.files:
        target = folder
        if path.parent != form.path.parent and name_split(path.parent.name) is not None:
            target /= path.parent.name
        name = re.sub(r"\.t(?:gz|bz2?|xz)$", ".tar", path.name, flags=re.IGNORECASE)
        target /= re.sub(r"\.(?:gz|bz2|xz)$", "", name, flags=re.IGNORECASE)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as partial, naming(target), partial.open("wb") as file:
                _unpack_file(path, file)
            # A pack that resumes knows the files again by their times.
            os.utime(target, ns=(0, path.stat().st_mtime_ns))
            if target.suffix == ".tar":
                _divide(target)


def _divide(path: Path) -> None:
    """Divide a tar of class folders in folders of splits (`train/cat`, `val/cat`) into a tar for
    each split; leave others as they are."""
    splits = set()
    with tarfile.open(path) as tar:
        for member in _list_files(tar):
            splits.add(_find_split(member.name))
    if None in splits or len(splits) < 2:
        return
    with ExitStack() as stack:
        tars = {}
        for split in splits:
            partial = stack.enter_context(replacing(path.with_name(f"{split}-{path.name}")))
            tars[split] = stack.enter_context(tarfile.open(partial, "w"))
        whole = stack.enter_context(tarfile.open(path))
        for member in _list_files(whole):
            tars[_find_split(member.name)].addfile(member, whole.extractfile(member))
    for split in splits:
        os.utime(path.with_name(f"{split}-{path.name}"), ns=(0, path.stat().st_mtime_ns))
    path.unlink()


def _list_files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]
        if member.isreg():
            yield member


def _find_split(name: str) -> str | None:
    return next(filter(None, map(name_split, name.split("/")[:-2])), None)


def _unpack_file(path: Path, target: Any) -> None:
    with open_regular(path, ANY_SIZE) as packed:
        begin = packed.read(2)
        packed.seek(0)
        if begin not in _OPEN:
            raise DataError(f"{path} is not compressed with gzip, bzip2 or xz; rename it")
        try:
            with _OPEN[begin](packed) as stream:
                while part := stream.read(_PART):
                    target.write(part)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(
                f"{path} is damaged or incomplete: {error}. Download or write it again"
            ) from None
