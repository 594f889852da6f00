"""Read archives of `numpy.savez` and `numpy.savez_compressed` that anyone may have written.

A member is an array. No pickle is read: arrays of objects are refused.
"""

import io
import math
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

NUMBERS = "biuf"
"""The kinds of NumPy's types that are numbers."""
_MEMBER = ".npy"
_OF_ZIP = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)


def read_npz(
    file: BinaryIO, *, most_members: int, most_bytes: int, kinds: str
) -> dict[str, np.ndarray]:
    """Return the arrays of an archive by name: read-only, with the types of the file.

    Args:
        file: The open archive.
        most_members: The maximum number of arrays.
        most_bytes: The maximum size of all arrays together, in bytes. It is checked against what
            the archive lists before a member is unpacked; a member never unpacks to more.
        kinds: The kinds of NumPy's types that arrays may have, such as `NUMBERS`. "V" stands for
            values of two bytes, as which NumPy stores bfloat16, and no others of that kind.

    Raises:
        ValueError: The archive is damaged, holds something else, or is too large.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > most_members:
                raise ValueError(
                    f"it has {len(members):,} arrays; expected at most {most_members:,}"
                )
            size = sum(member.file_size for member in members)
            if size > most_bytes:
                raise ValueError(f"it expands to {size:,} bytes, more than {most_bytes:,}")
            # Before it reads, Python allocates as many packed bytes as the archive lists.
            if sum(member.compress_size for member in members) > file.seek(0, io.SEEK_END):
                raise ValueError("it lists more bytes than it has")
            arrays: dict[str, np.ndarray] = {}
            for member in members:
                name = member.filename.removesuffix(_MEMBER)
                if name in arrays:
                    raise ValueError(f"it has the array {name!r:.100} twice")
                arrays[name] = read_npy(name, archive.read(member), kinds)
            return arrays
    except (OverflowError, *_OF_ZIP) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def read_npy(name: str, data: bytes, kinds: str) -> np.ndarray:
    """Return the array in the bytes of a file of `numpy.save`, as a view of them. Raises
    `ValueError`."""
    stream = io.BytesIO(data)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(stream)
    if version not in read_header:
        raise ValueError(f"{name!r:.100} has version {version} of NumPy's format")
    shape, by_columns, dtype = read_header[version](stream)
    if dtype.kind not in kinds or (dtype.kind == "V" and dtype.str[1:] != "V2"):
        raise ValueError(f"{name!r:.100} holds {dtype}, which is not accepted here")
    left = len(data) - stream.tell()
    if math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"{name!r:.100} is {dtype} {list(shape)}, but has {left:,} bytes")
    values: np.ndarray[Any, Any] = np.frombuffer(data, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C")
