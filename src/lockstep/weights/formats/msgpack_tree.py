"""Read and write Flax's files of MessagePack without Flax.

`flax.serialization.to_bytes` writes trees of dicts, numbers, texts and arrays. An array is an
extension of type 1 (a scalar of NumPy: type 3), whose bytes are MessagePack too: a list of its
shape, the name of its type, and its numbers in row-major order. Flax divides arrays of more than
1 GiB into parts; these are read as the dict that the file has.

Numbers of MessagePack are big endian, those of arrays little endian, as the machines write them
that Flax runs on.

Sources: the specification of MessagePack; Flax 0.12.8, flax/serialization.py.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep.weights.formats import BFLOAT16, ByteReader, naming_damage, refuse_many
from lockstep.weights.formats.lfs_pointers import read_whole

_ARRAY = 1
_SCALAR = 3
_DTYPES: dict[str, "np.dtype[Any]"] = {"bfloat16": BFLOAT16}
for _code in ("?", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"):
    _DTYPES[np.dtype(_code).name] = np.dtype(f"<{_code}")
_NUMBERS = dict(enumerate((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), 0xCA))
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_DICTS = {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_MOST_LEVELS = 32
_MOST_VALUES = 1_000_000
_MOST_AXES = 32


def begins_dict(head: bytes) -> bool:
    """Return whether a file begins with a dict whose first key is a text of printable letters."""
    reader = _Reader(head)
    try:
        if not reader.read_dict_size(reader.number(">B")):
            return False
        return reader.text(reader.number(">B")).isprintable()
    except ValueError:
        return False


def load(path: Path) -> Any:
    """Return what a file holds: dicts by text, lists, plain values, bytes, and read-only arrays.

    Raises `CheckpointError` if it is damaged or holds anything else.
    """
    reader = _Reader(read_whole(path))
    with naming_damage(path, "a file of flax.serialization"):
        value = reader.value(0)
        if reader.left:
            raise ValueError(f"{reader.left} bytes follow its end")
    refuse_many(path, reader.arrays)
    return value


class _Reader(ByteReader):
    """Reads values in order. Raises `ValueError` if they are none of Flax's values."""

    def __init__(self, data: bytes | memoryview) -> None:
        super().__init__(data)
        self._values = 0
        self.arrays = 0
        """The number of arrays that were read."""

    def value(self, level: int) -> Any:
        """Read a value inside `level` lists and dicts."""
        self._values += 1
        if level > _MOST_LEVELS or self._values > _MOST_VALUES:
            raise ValueError(
                f"it has more than {_MOST_LEVELS} levels, or more than {_MOST_VALUES:,} values"
            )
        first = self.number(">B")
        if first <= 0x7F or first >= 0xE0:
            return first if first <= 0x7F else first - 256
        if first in _PLAIN:
            return _PLAIN[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if first in _BYTES:
            return self.take(self.number(_BYTES[first]))
        if first <= 0x8F or first in _DICTS:
            return dict(self._read_entries(self.read_dict_size(first), level))
        if first <= 0x9F or first in _LISTS:
            size = first - 0x90 if first <= 0x9F else self.number(_LISTS[first])
            return [self.value(level + 1) for _ in range(size)]
        if first in _EXTENSIONS or 0xD4 <= first <= 0xD8:
            return self._read_extension(first)
        return self.text(first)

    def read_dict_size(self, first: int) -> int:
        """Return the number of entries of a dict that begins with this byte."""
        if 0x80 <= first <= 0x8F:
            return first - 0x80
        if first not in _DICTS:
            raise ValueError(f"there is byte {first:#x} instead of a dict")
        return int(self.number(_DICTS[first]))

    def text(self, first: int) -> str:
        """Return the text that begins with this byte."""
        if 0xA0 <= first <= 0xBF:
            return str(self.take(first - 0xA0), "utf-8")
        if first not in _TEXTS:
            raise ValueError(f"there is byte {first:#x} instead of a string")
        return str(self.take(self.number(_TEXTS[first])), "utf-8")

    def _read_entries(self, size: int, level: int) -> Iterator[tuple[str, Any]]:
        names = set()
        for _ in range(size):
            name = self.text(self.number(">B"))
            if name in names:
                raise ValueError(f"a dict has the key {name!r:.60} twice")
            names.add(name)
            yield name, self.value(level + 1)

    def _read_extension(self, first: int) -> np.ndarray:
        fixed = 0xD4 <= first <= 0xD8
        size = 1 << (first - 0xD4) if fixed else self.number(_EXTENSIONS[first])
        kind = self.number(">b")
        if kind not in (_ARRAY, _SCALAR):
            raise ValueError(f"it has an extension of type {kind}, which is not a Flax array")
        self.arrays += 1
        inside = _Reader(self.take(size))
        array = inside._read_array(inside.value(0))
        if inside.left:
            raise ValueError(f"{inside.left} bytes follow an array")
        return array

    def _read_array(self, parts: Any) -> np.ndarray:
        """Return the array of a list of its shape, its type and its bytes, as a view of these."""
        if not isinstance(parts, list) or len(parts) != 3:
            raise ValueError("an array is not a list of its shape, its type and its bytes")
        shape, name, numbers = parts
        if isinstance(name, memoryview):
            name = str(name, "utf-8")
        is_known = isinstance(name, str) and name in _DTYPES
        if not is_known or not isinstance(numbers, memoryview):
            raise ValueError(f"an array is of the type {name!r:.60}, which weights do not have")
        if not isinstance(shape, list) or len(shape) > _MOST_AXES:
            raise ValueError(f"an array has no shape, or more than {_MOST_AXES} axes")
        if any(type(length) is not int or not 0 <= length < 2**48 for length in shape):
            raise ValueError(f"an array has the shape {shape!r:.60}")
        return np.frombuffer(numbers, _DTYPES[name]).reshape(shape)


def dump(path: Path, tree: Mapping[str, Any]) -> None:
    """Write dicts of arrays as `flax.serialization.to_bytes` does. An array is of a type that
    `load` reads."""
    with path.open("wb") as file:
        _write_dict(file, tree)


def _write_dict(file: BinaryIO, tree: Mapping[str, Any]) -> None:
    file.write(_pack_size(len(tree), (0x80, 16), _DICTS))
    for name, value in tree.items():
        text = name.encode()
        file.write(_pack_size(len(text), (0xA0, 32), _TEXTS) + text)
        if isinstance(value, Mapping):
            _write_dict(file, value)
        else:
            _write_array(file, value)


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    little = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    name = array.dtype.name.encode()
    shape = b"".join(map(_pack_number, array.shape))
    begin = b"\x93" + _pack_size(array.ndim, (0x90, 16), _LISTS) + shape
    begin += _pack_size(len(name), (0xA0, 32), _TEXTS) + name
    begin += _pack_size(array.nbytes, (0, 0), _BYTES)
    size = len(begin) + array.nbytes
    if size in (1, 2, 4, 8, 16):
        file.write(bytes([0xD4 + size.bit_length() - 1, _ARRAY]))
    else:
        file.write(_pack_size(size, (0, 0), _EXTENSIONS) + bytes([_ARRAY]))
    file.write(begin)
    file.write(little.data)


def _pack_number(number: int) -> bytes:
    """Return a number of at least 0 in the shortest form."""
    if number < 0x80:
        return bytes([number])
    for first in (0xCC, 0xCD, 0xCE, 0xCF):
        if number < 256 ** struct.calcsize(_NUMBERS[first]):
            return bytes([first]) + struct.pack(_NUMBERS[first], number)
    raise ValueError(f"{number} does not fit into 8 bytes")


def _pack_size(size: int, short: tuple[int, int], forms: Mapping[int, str]) -> bytes:
    """Return the beginning of a text, a list, a dict or bytes in the shortest form. `short` has the
    first byte of its shortest form and the number of sizes that this has."""
    first, count = short
    if size < count:
        return bytes([first + size])
    for byte, form in forms.items():
        if size < 256 ** struct.calcsize(form):
            return bytes([byte]) + struct.pack(form, size)
    raise ValueError(f"{size} does not fit into 4 bytes")
