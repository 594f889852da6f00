"""Read and write TensorFlow's tensor bundles, the files of its checkpoints (V2), without
TensorFlow.

    <prefix>.index                  name -> type, shape, place and checksum of every tensor
    <prefix>.data-00000-of-00001    the tensors' values in little endian, one after the other; there may be several files
    checkpoint                      text in the same folder: which prefix is the folder's newest

The index is a sorted table in LevelDB's format:

- A table is blocks of entries, a block with their places, and a footer with the place of that
  block.
- An entry is three lengths (of the part that its key shares with the key before, of the rest of its
  key, of its value), the rest of the key, and the value.
- A block ends with the places of its complete keys, their number, a byte for the compression, and a
  masked CRC-32C.
- Values are protocol buffers.

Every checksum is verified: those of blocks when a bundle is opened, that of a tensor when it is
read.

Sources: tensorflow/core/util/tensor_bundle, core/protobuf/tensor_bundle.proto,
core/lib/io/table_format.txt.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from lockstep.data.containers import Places
from lockstep.system.crc import masked_crc
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.weights.formats import BFLOAT16, dtype_name, numbers, refuse_existing
from lockstep.weights.formats.stand_ins import refuse_stand_in

_MESSAGES = """
name: "lockstep/tensor_bundle.proto" package: "lockstep" syntax: "proto3"
message_type {
  name: "Version"
  field { name: "producer" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "min_consumer" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
}
message_type {
  name: "Header"
  field { name: "num_shards" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "endianness" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "version" number: 3 type: TYPE_MESSAGE type_name: "Version" label: LABEL_OPTIONAL }
}
message_type { name: "Dim" field { name: "size" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL } }
message_type {
  name: "Shape"
  field { name: "dim" number: 2 type: TYPE_MESSAGE type_name: "Dim" label: LABEL_REPEATED }
  field { name: "unknown_rank" number: 3 type: TYPE_BOOL label: LABEL_OPTIONAL }
}
message_type { name: "Slice" }
message_type {
  name: "Entry"
  field { name: "dtype" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "shape" number: 2 type: TYPE_MESSAGE type_name: "Shape" label: LABEL_OPTIONAL }
  field { name: "shard_id" number: 3 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "offset" number: 4 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "size" number: 5 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "crc32c" number: 6 type: TYPE_FIXED32 label: LABEL_OPTIONAL }
  field { name: "slices" number: 7 type: TYPE_MESSAGE type_name: "Slice" label: LABEL_REPEATED }
}
message_type {
  name: "CheckpointState"
  field { name: "model_checkpoint_path" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "all_model_checkpoint_paths" number: 2 type: TYPE_STRING label: LABEL_REPEATED }
}
"""
"""The needed parts of TensorFlow's tensor_bundle.proto, tensor_shape.proto, versions.proto and
checkpoint_state.proto."""

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_BLOCK_BYTES = 262144
_RESTART_INTERVAL = 16
_VERSION = 1
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: BFLOAT16,
    19: np.dtype("<f2"),
}
"""Dtypes by TensorFlow's number."""
DTYPE_NAMES = {number: dtype_name(dtype) for number, dtype in _DTYPES.items()}
_OTHER_DTYPES = {
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    10: "bool",
    17: "uint16",
    18: "complex128",
}
_OTHER_DTYPES |= {20: "resource", 21: "variant", 22: "uint32", 23: "uint64"}
_WRITTEN_DTYPES = {dtype: number for number, dtype in _DTYPES.items() if dtype != BFLOAT16}

_ENDING = re.compile(r"(?<=.)\.(index|meta|data-[0-9]{5}-of-[0-9]{5})$")

Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's entry in the index."""

    dtype: int
    """TensorFlow's number of the type."""
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    """The size in bytes."""
    crc: int
    slices: int
    """The number of parts of a partitioned variable; 0 for a variable in one part."""

    @property
    def dtype_name(self) -> str:
        """The name of the type, such as "bfloat16"."""
        return (
            dtype_name(_DTYPES[self.dtype])
            if self.dtype in _DTYPES
            else _OTHER_DTYPES.get(self.dtype, str(self.dtype))
        )


@cache
def _messages() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
    return pool


@cache
def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_messages().FindMessageTypeByName(f"lockstep.{name}"))


def index_path(prefix: Path) -> Path:
    """Return the path of a checkpoint's index."""
    return prefix.with_name(f"{prefix.name}.index")


def data_path(prefix: Path, shard: int, shards: int) -> Path:
    """Return the path of one of the files with the values."""
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")


def find(path: Path) -> Path | None:
    """Return the prefix of the checkpoint that a path names; None if it names none.

    A path is a prefix, one of its files, or a folder. The folder must have a single checkpoint, or
    a file `checkpoint` that names the newest. Raises `CheckpointError` if a folder has several
    checkpoints and none is named, or the named one is missing.
    """
    if path.is_dir():
        return _newest_of(path)
    prefix = path.with_name(_ENDING.sub("", path.name)) if path.name else path
    return prefix if prefix.name and index_path(prefix).is_file() else None


def _newest_of(folder: Path) -> Path | None:
    found = sorted(
        entry.name.removesuffix(".index") for entry in folder.glob("*.index") if entry.is_file()
    )
    state = folder / "checkpoint"
    if not state.is_file():
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} has {', '.join(found)} and no file `checkpoint` that names the newest;"
                " name one"
            )
        return folder / found[0] if found else None
    try:
        text = read_regular_text(state, TEXT)
        named = text_format.Parse(
            text, _message("CheckpointState")(), allow_unknown_field=True
        ).model_checkpoint_path
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise CheckpointError(
            f"{state} cannot be read: {error}; name one of {found} directly"
        ) from None
    # Training writes an absolute path if it was given one, and that is wrong as soon as the folder
    # is moved.
    prefix = folder / Path(named).name
    if not named or not index_path(prefix).is_file():
        raise CheckpointError(
            f"{state} names {named!r}, which does not exist; name one of {found} directly"
        )
    return prefix


class Bundle:
    """A checkpoint opened for reading. Raises `CheckpointError`, here and in `read`, if it is
    damaged or incomplete."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        path = index_path(prefix)
        try:
            refuse_stand_in(path)
            self._shards, self.entries = _contents(_pairs(Places(path)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged or not the index of a TensorFlow checkpoint: {error}. "
                "Copy it again, or use an earlier checkpoint."
            ) from None
        self._files: dict[int, Places] = {}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored, as a new array; bfloat16 becomes float32."""
        entry = self.entries[name]
        about = f"{self.prefix}: {name}"
        if entry.slices:
            raise CheckpointError(
                f"{about} is partitioned into {entry.slices} slices; save it again without a"
                " partitioner"
            )
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{about} is of type {entry.dtype_name}; expected floating-point numbers or int32,"
                " int64"
            )
        dtype = _DTYPES[entry.dtype]
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise CheckpointError(
                f"{about} has {entry.size} bytes, which does not fit its shape {entry.shape}"
            )
        data = self._bytes(entry, about)
        if masked_crc(data) != entry.crc:
            path = data_path(self.prefix, entry.shard, self._shards)
            raise CheckpointError(
                f"{about} is damaged: its checksum is wrong. Copy {path.name} again."
            )
        values = numbers(np.frombuffer(data, dtype).reshape(entry.shape))
        return values.astype(values.dtype.newbyteorder("="))

    def _bytes(self, entry: Entry, about: str) -> bytes:
        path = data_path(self.prefix, entry.shard, self._shards)
        try:
            if entry.shard not in self._files:
                refuse_stand_in(path)
                self._files[entry.shard] = Places(path)
            file = self._files[entry.shard]
            _check_inside(file, entry.offset, entry.size)
            return file.read(entry.offset, entry.size)
        except OSError as error:
            raise CheckpointError(
                f"{about} is in {path}, which cannot be read: {error.strerror}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{about} is in {path}, which is damaged: {error}. Copy it again."
            ) from None


def _contents(pairs: Iterable[Pair]) -> tuple[int, dict[str, Entry]]:
    """Return the number of data files and the entries of their tensors. Raises `ValueError`."""
    stored = dict(pairs)
    if b"" not in stored:
        raise ValueError("it has no header")
    header = _parsed("Header", stored.pop(b""))
    if header.endianness != 0:
        raise ValueError("its values are in big endian; save it again on a little-endian machine")
    if header.version.min_consumer > _VERSION:
        raise ValueError(
            f"it is of version {header.version.min_consumer}, newer than the known {_VERSION}"
        )
    # A key that begins with a zero byte is a slice of a partitioned variable. The variable itself
    # has another entry.
    return header.num_shards, {
        key.decode("utf-8"): _entry(key, value, header.num_shards)
        for key, value in stored.items()
        if not key.startswith(b"\0")
    }


def _entry(key: bytes, value: bytes, shards: int) -> Entry:
    found = _parsed("Entry", value)
    shape = tuple(dim.size for dim in found.shape.dim)
    whole = not found.shape.unknown_rank and min((*shape, found.offset, found.size)) >= 0
    if not whole or not 0 <= found.shard_id < shards:
        raise ValueError(f"its entry for {key.decode('utf-8')} is not valid")
    return Entry(
        found.dtype,
        shape,
        found.shard_id,
        found.offset,
        found.size,
        found.crc32c,
        len(found.slices),
    )


def _parsed(name: str, data: bytes) -> Any:
    try:
        return _message(name).FromString(data)
    except DecodeError:
        raise ValueError(f"an entry is not a message of type {name}") from None


def _pairs(file: Places) -> Iterator[Pair]:
    """Yield the keys and values of a table in ascending order of keys. Raises `ValueError` that
    says what is wrong."""
    if file.size < _FOOTER_BYTES:
        raise ValueError(f"it has {file.size} bytes, less than a footer")
    footer = file.read(file.size - _FOOTER_BYTES, _FOOTER_BYTES)
    if _UINT64.unpack_from(footer, _FOOTER_BYTES - _UINT64.size)[0] != _MAGIC:
        raise ValueError("it does not end with the magic number of a table")
    others, at = _handle(footer, 0)
    _block(
        file, *others
    )  # the block about other kinds of blocks, which is empty; this verifies its checksum
    index, _ = _handle(footer, at)
    last: bytes | None = None
    for _, place in _block_pairs(_block(file, *index)):
        for key, value in _block_pairs(_block(file, *_handle(place, 0)[0])):
            if last is not None and key <= last:
                raise ValueError("its names are not in order")
            last = key
            yield key, value


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number that is stored in seven bits per byte, the lowest first, and the offset after
    it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("a number is truncated")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


def _block(file: Places, offset: int, size: int) -> bytes:
    """Return the contents of a block after verifying its checksum."""
    _check_inside(file, offset, size + _TRAILER_BYTES)
    data = file.read(offset, size + _TRAILER_BYTES)
    if masked_crc(data[: size + 1]) != _UINT32.unpack_from(data, size + 1)[0]:
        raise ValueError(f"the checksum of the block at byte {offset} is wrong")
    if data[size] != 0:
        raise ValueError(
            f"the block at byte {offset} is compressed, which TensorFlow never does; save it again"
        )
    return data[:size]


def _check_inside(file: Places, offset: int, size: int) -> None:
    if offset + size > file.size:
        raise ValueError(f"bytes {offset} to {offset + size} are beyond its end at {file.size}")


def _block_pairs(block: bytes) -> Iterator[Pair]:
    if len(block) < _UINT32.size:
        raise ValueError("a block is empty")
    end = len(block) - _UINT32.size * (1 + _UINT32.unpack_from(block, len(block) - _UINT32.size)[0])
    if end < 0:
        raise ValueError("a block is truncated")
    at = 0
    key = b""
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + rest + length > end:
            raise ValueError("an entry extends beyond its block")
        key = key[:shared] + block[at : at + rest]
        yield key, block[at + rest : at + rest + length]
        at += rest + length


def write(prefix: Path, tensors: Mapping[str, np.ndarray]) -> tuple[Path, Path]:
    """Write a checkpoint with one data file; return the index and the data file.

    The index is written last: without it there is no checkpoint. Raises `CheckpointError` if the
    checkpoint exists already or cannot be written, or if a tensor's dtype is not float16, float32,
    float64, int32 or int64.
    """
    index = index_path(prefix)
    data = data_path(prefix, 0, 1)
    refuse_existing(index, data)
    for name, value in tensors.items():
        if (
            not name
            or name.startswith("\0")
            or value.dtype.newbyteorder("<") not in _WRITTEN_DTYPES
        ):
            raise CheckpointError(
                f"{prefix}: {name!r} of type {value.dtype} cannot be written to a TensorFlow"
                " checkpoint"
            )
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with appearing(data) as partial:
            entries = _write_values(partial, tensors)
        try:
            with appearing(index) as partial:
                partial.write_bytes(_table([(b"", _header()), *entries]))
        except BaseException:
            data.unlink()
            raise
    except OSError as error:
        raise CheckpointError(f"{prefix} cannot be written: {error}") from None
    return index, data


def write_newest(prefix: Path) -> Path:
    """Write the file `checkpoint`, by which TensorFlow finds a folder's newest checkpoint.

    Raises `CheckpointError` if the file exists already or cannot be written.
    """
    state = _message("CheckpointState")(
        model_checkpoint_path=prefix.name, all_model_checkpoint_paths=[prefix.name]
    )
    path = prefix.with_name("checkpoint")
    refuse_existing(path)
    try:
        with appearing(path) as partial:
            partial.write_text(text_format.MessageToString(state, as_utf8=True), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None
    return path


def _header() -> bytes:
    version = _message("Version")(producer=_VERSION)
    return bytes(
        _message("Header")(num_shards=1, version=version).SerializeToString(deterministic=True)
    )


def _write_values(path: Path, tensors: Mapping[str, np.ndarray]) -> list[Pair]:
    """Write a data file; return the entries for the index, in order."""
    entries = []
    offset = 0
    with path.open("wb") as file:
        for name in sorted(tensors, key=str.encode):
            dtype = tensors[name].dtype.newbyteorder("<")
            data = np.ascontiguousarray(tensors[name], dtype).tobytes()
            file.write(data)
            shape = _message("Shape")(
                dim=[_message("Dim")(size=size) for size in tensors[name].shape]
            )
            place = {"offset": offset, "size": len(data), "crc32c": masked_crc(data)}
            entry = _message("Entry")(dtype=_WRITTEN_DTYPES[dtype], shape=shape, **place)
            entries.append((name.encode(), bytes(entry.SerializeToString(deterministic=True))))
            offset += len(data)
    return entries


def _table(pairs: list[Pair]) -> bytes:
    """Return a table of pairs. Their keys must be in ascending order."""
    table = bytearray()
    places = [
        (part[-1][0], _append(table, _packed(part, _RESTART_INTERVAL))) for part in _parts(pairs)
    ]
    about_blocks = _append(table, _packed([], 1))
    footer = about_blocks + _append(table, _packed(places, 1))
    return bytes(table + footer.ljust(_FOOTER_BYTES - _UINT64.size, b"\0") + _UINT64.pack(_MAGIC))


def _parts(pairs: list[Pair]) -> Iterator[list[Pair]]:
    part = []
    size = 0
    for key, value in pairs:
        part.append((key, value))
        size += len(key) + len(value)
        if size >= _BLOCK_BYTES:
            yield part
            part = []
            size = 0
    if part:
        yield part


def _append(table: bytearray, block: bytes) -> bytes:
    """Append a block with its trailer; return its place, encoded."""
    place = _number(len(table)) + _number(len(block))
    block += b"\0"
    table += block + _UINT32.pack(masked_crc(block))
    return place


def _packed(pairs: Iterable[Pair], interval: int) -> bytes:
    """Return the contents of a block. Every `interval`-th key is stored completely."""
    block = bytearray()
    restarts = [0]
    last = b""
    for i, (key, value) in enumerate(pairs):
        if i and i % interval == 0:
            restarts.append(len(block))
        shared = 0 if i % interval == 0 else _shared(last, key)
        block += (
            _number(shared)
            + _number(len(key) - shared)
            + _number(len(value))
            + key[shared:]
            + value
        )
        last = key
    return bytes(block) + b"".join(map(_UINT32.pack, [*restarts, len(restarts)]))


def _shared(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix of two keys in bytes."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _number(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
