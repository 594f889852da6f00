"""Read and write archives of `numpy.savez` and `numpy.savez_compressed`: an array a member.

No pickle is read: arrays of objects are refused.
"""

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights.formats import BFLOAT16, refuse_many

_MEMBER = ".npy"
_BEGIN = b"PK\x03\x04"
_MOST_GROWTH = 16
"""Compressed weights are hardly smaller. What grows more was made to fill the memory."""
_OF_ZIP = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)


def is_npz(head: bytes) -> bool:
    """Return whether a file that begins so is an archive whose first member is an array."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(_BEGIN) and head[30 : 30 + length].endswith(_MEMBER.encode())


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays by name. They are read-only, and of the types of the file.

    Raises `CheckpointError` if the file is damaged, holds objects, or expands to more than 16 times
    its size.
    """
    try:
        with open_regular(path, WEIGHTS) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            refuse_many(path, len(members))
            size = sum(member.file_size for member in members)
            if size > _MOST_GROWTH * path.stat().st_size:
                raise ValueError(f"it expands to {size:,} bytes")
            arrays: dict[str, np.ndarray] = {}
            for member in members:
                name = member.filename.removesuffix(_MEMBER)
                if name in arrays:
                    raise ValueError(f"it has the array {name!r:.100} twice")
                arrays[name] = _read_array(name, archive.read(member))
            return arrays
    except (ValueError, OverflowError, *_OF_ZIP) as error:
        raise CheckpointError(
            f"{path} is damaged or not an archive of numpy.savez: {error}. Copy it again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_array(name: str, data: bytes) -> np.ndarray:
    """Return the array of a member as a view of its bytes. Raises `ValueError`."""
    stream = io.BytesIO(data)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(stream)
    if version not in read_header:
        raise ValueError(f"{name!r:.100} has version {version} of NumPy's format")
    shape, by_columns, dtype = read_header[version](stream)
    if dtype.str[1:] == "V2":  # JAX's bfloat16, as NumPy stores it
        dtype = BFLOAT16
    if dtype != BFLOAT16 and dtype.kind not in "biuf":
        raise ValueError(f"{name!r:.100} holds {dtype}, which weights do not have")
    left = len(data) - stream.tell()
    if math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"{name!r:.100} is {dtype} {list(shape)}, but has {left:,} bytes")
    values: np.ndarray[Any, Any] = np.frombuffer(data, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C")


def dump(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as `numpy.savez` does."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
