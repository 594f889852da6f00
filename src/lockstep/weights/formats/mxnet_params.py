"""Read and write MXNet's files of named arrays (`.params`) without MXNet.

All numbers are little endian:

    uint64 0x112, uint64 0, uint64 <number of arrays>
    for each array: uint32 <version>, int32 <storage type>, int32 <axes>, int64 <size of each axis>,
                    int32 <device type>, int32 <device number>, int32 <type>, its values
    uint64 <number of names>, for each name: uint64 <length>, UTF-8

| version | written by |
|---|---|
| 0xF993FAC9 | MXNet 1 |
| 0xF993FACA | MXNet 1 with NumPy's shapes |
| 0xF993FAC8 | an older MXNet: there is no storage type |
| none: the number of axes is in its place | the first MXNet: sizes are uint32 |

With NumPy's shapes, a shape without axes is one number; in other versions, it is no array. Storage
types other than 0 are sparse.

Source: MXNet's src/ndarray/ndarray.cc, include/mxnet/tuple.h, and files that MXNet 1.9.1 wrote.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, ByteReader, naming_damage
from lockstep.weights.formats.lfs_pointers import read_whole

_MAGIC = 0x112
BEGIN = struct.pack("<2Q", _MAGIC, 0)
"""How a file begins."""
_V1 = 0xF993FAC8
_V2 = 0xF993FAC9
_V3 = 0xF993FACA
_SPARSE = {1: "row_sparse", 2: "csr"}
_CPU = 1
_DEVICES = (_CPU, 2, 3, 5)
"""CPU, GPU, pinned CPU memory and shared CPU memory."""
_DTYPES: dict[int, np.dtype[Any]] = {
    **dict(enumerate(map(np.dtype, ("<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8", "?")))),
    12: BFLOAT16,
}
"""Dtypes by MXNet's number."""
_WRITTEN_DTYPES = {dtype: number for number, dtype in _DTYPES.items() if dtype != BFLOAT16}
_MOST_AXES = 32
_LEAST_BYTES = 16
"""Size of the smallest array, one without values."""


def load(path: Path) -> dict[str, np.ndarray]:
    """Return a file's arrays by name, in the file's order. They are read-only, and of the types of
    the file.

    Raises `CheckpointError` if the file is damaged or of another format, or if its arrays are
    sparse or have no names.
    """
    data = read_whole(path)
    with naming_damage(path, "an MXNet file of named arrays"):
        return _read_named_arrays(ByteReader(data))


def dump(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file that every MXNet 1 reads.

    An array must have a dtype that MXNet supports, at least one axis, and no axis of size 0, which
    MXNet treats as unknown. Raises `CheckpointError` for any other array.
    """
    for name, value in arrays.items():
        if value.dtype.newbyteorder("<") not in _WRITTEN_DTYPES or not value.ndim or not value.size:
            raise CheckpointError(
                f"MXNet cannot store {name}, {value.dtype} {list(value.shape)}; expected values of"
                " float16, 32, 64, int8, 32, 64, uint8 or bool, and at least one axis"
            )
    with path.open("wb") as file:
        file.write(struct.pack("<3Q", _MAGIC, 0, len(arrays)))
        for value in arrays.values():
            dtype = value.dtype.newbyteorder("<")
            file.write(struct.pack(f"<I2i{value.ndim}q", _V2, 0, value.ndim, *value.shape))
            file.write(struct.pack("<3i", _CPU, 0, _WRITTEN_DTYPES[dtype]))
            file.write(np.ascontiguousarray(value, dtype).data)
        file.write(struct.pack("<Q", len(arrays)))
        for encoded in (name.encode() for name in arrays):
            file.write(struct.pack("<Q", len(encoded)) + encoded)


def _read_named_arrays(reader: ByteReader) -> dict[str, np.ndarray]:
    magic, reserved = reader.numbers("<2Q", "its beginning")
    if (magic, reserved) != (_MAGIC, 0):
        raise ValueError(
            f"it begins with {magic:#x} and {reserved:#x}, expected {_MAGIC:#x} and 0x0"
        )
    count = reader.number("<Q", "the number of its arrays")
    if count * _LEAST_BYTES > reader.left:
        raise ValueError(f"it claims to have {count} arrays in {reader.left} bytes")
    arrays = [_read_array(reader, f"array {i}") for i in range(count)]
    names = reader.number("<Q", "the number of its names")
    if names != count:
        raise ValueError(f"it has {count} arrays and {names} names")
    named: dict[str, np.ndarray] = {}
    for i, array in enumerate(arrays):
        length = reader.number("<Q", f"the length of name {i}")
        name = str(reader.take(length, f"name {i}"), "utf-8")
        if name in named:
            raise ValueError(f"two of its arrays have the name {name}")
        named[name] = array
    if reader.left:
        raise ValueError(f"{reader.left} bytes follow its end")
    return named


def _read_array(reader: ByteReader, what: str) -> np.ndarray:
    """Return an array that is a view of the file's bytes."""
    version = reader.number("<I", what)
    if version in (_V2, _V3):
        storage = reader.number("<i", what)
        if storage:
            kind = _SPARSE.get(storage, f"of storage type {storage}")
            raise ValueError(f"{what} is {kind}, expected a dense array")
    axes = version
    kind = "I"  # of the first MXNet
    if version in (_V1, _V2, _V3):
        axes = reader.number("<i", what)
        kind = "q"
    if not int(version != _V3) <= axes <= _MOST_AXES:
        raise ValueError(f"{what} has {axes} axes, expected 1 to {_MOST_AXES}")
    shape = reader.numbers(f"<{axes}{kind}", f"the shape of {what}")
    if min(shape, default=0) < 0:
        raise ValueError(f"{what} has the shape {list(shape)}")
    device, _, number = reader.numbers("<3i", f"the type of {what}")
    if device not in _DEVICES or number not in _DTYPES:
        raise ValueError(
            f"{what} has device {device} and type {number}, expected one of {list(_DEVICES)} and"
            f" {list(_DTYPES)}"
        )
    dtype = _DTYPES[number]
    values = reader.take(math.prod(shape) * dtype.itemsize, f"{what}, {dtype} {list(shape)},")
    return np.frombuffer(values, dtype).reshape(shape)
