"""Unpack compressed tars and TFRecords into files that are read as they are."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.data.containers import Damage
from lockstep.data.containers.places import Places
from lockstep.data.containers.webdataset import members
from lockstep.data.forms import Form, group_by_split, name_split
from lockstep.data.sources import unpack_name
from lockstep.system.errors import DataError
from lockstep.system.files import naming, replacing
from lockstep.system.regular_files import ANY_SIZE, open_regular

_GZIP = b"\x1f\x8b"
_STREAMS: dict[bytes, Callable[[], Any]] = {
    b"BZ": bz2.BZ2Decompressor,
    b"\xfd7": lzma.LZMADecompressor,
}
"""By the first bytes of a file: what reads one of its streams."""
_PART = 2**20


def unpack(form: Form, folder: Path) -> None:
    """Unpack the files of a data set into `folder` and folders of splits in it, unless they are
    there: then their checksums were right. Raises `DataError` if one is damaged."""
    for split, paths in group_by_split(form).items():
        for path in paths:
            target = folder / split / unpack_name(path.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file():
                with replacing(target) as partial, naming(target), partial.open("wb") as file:
                    _unpack_file(path, file)
                # A pack that resumes recognises the files by their times.
                os.utime(target, ns=(0, path.stat().st_mtime_ns))
            if target.suffix == ".tar":
                _divide(target)


def _divide(path: Path) -> None:
    """Divide a tar of class folders in folders of splits (`train/cat`, `val/cat`) into a tar in the
    folder of each split; leave others as they are, and those that are damaged to their reader.

    It is emptied last, so that a pack that resumes finishes this and does not unpack it again.
    """
    file = Places(path)
    parts = {}
    for member in members(file):
        split = _find_split(member)
        if split != "":
            parts[split] = path.parent / str(split) / path.name
    if None in parts or len(parts) < 2:
        return
    with ExitStack() as stack:
        tars = {}
        for split, part in parts.items():
            part.parent.mkdir(exist_ok=True)
            partial = stack.enter_context(replacing(part))
            tars[split] = stack.enter_context(tarfile.open(partial, "w"))
        for member in members(file):
            if isinstance(member, tarfile.TarInfo) and member.isreg():
                tar = tars[_find_split(member)]
                tar.addfile(member, io.BytesIO(file.read(member.offset_data, member.size)))
                tar.members.clear()  # type: ignore[attr-defined]
    for part in parts.values():
        os.utime(part, ns=(0, path.stat().st_mtime_ns))
    path.write_bytes(b"")


def _find_split(member: tarfile.TarInfo | Damage) -> str | None:
    """Return the split of a file of a class folder; None if it has none; "" for other members."""
    if isinstance(member, Damage):
        return None
    if not member.isreg():
        return ""
    return next(filter(None, map(name_split, member.name.split("/")[:-2])), None)


def _unpack_file(path: Path, target: Any) -> None:
    with open_regular(path, ANY_SIZE) as packed:
        begin = packed.read(2)
        packed.seek(0)
        if begin != _GZIP and begin not in _STREAMS:
            raise DataError(f"{path} is not compressed with gzip, bzip2 or xz; rename it")
        try:
            if begin == _GZIP:
                with gzip.GzipFile(fileobj=packed) as stream:
                    shutil.copyfileobj(stream, target, _PART)
            else:
                target.writelines(_read_streams(packed, _STREAMS[begin]))
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(
                f"{path} is damaged or incomplete: {error}. Download or write it again"
            ) from None


def _read_streams(packed: Any, begin_stream: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the contents of all streams of a file. `bz2.open` and `lzma.open` would end at a second
    stream that is damaged, without an error."""
    rest = packed.read(_PART)
    while rest:
        stream = begin_stream()
        while not stream.eof:
            if stream.needs_input and not rest:
                rest = packed.read(_PART)
                if not rest:
                    raise EOFError("it ends too early")
            yield stream.decompress(rest, _PART)
            rest = b""
        # Zeros may fill the end of a stream.
        rest = (stream.unused_data + packed.read(_PART)).lstrip(b"\0") or packed.read(_PART)
