"""Read and write TensorFlow's tensor bundles, the files of its checkpoints (V2), without
TensorFlow.

    <prefix>.index                  name -> type, shape, place and checksum of every tensor
    <prefix>.data-00000-of-00001    the tensors' values in little endian, one after the other
    checkpoint                      text in the same folder: which prefix is the folder's newest

There may be several files of values. The index is a sorted table of keys and values in LevelDB's
format, whose values are protocol buffers:

- A table is blocks of entries, a block with their places, and a footer with the place of that
  block.
- An entry is three lengths (of the part that its key shares with the key before, of the rest of its
  key, of its value), the rest of the key, and the value.
- A block ends with the places of its complete keys, their number, a byte for the compression, and a
  masked CRC-32C.

Every checksum is verified: those of blocks when a bundle is opened, that of a tensor when it is
read.

Sources: tensorflow/core/util/tensor_bundle, core/protobuf/tensor_bundle.proto,
core/lib/io/table_format.txt.
"""

import io
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from lockstep.data.containers.places import Places
from lockstep.system.crc import masked_crc
from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.weights.formats import BFLOAT16, dtype_name, naming_damage, numbers
from lockstep.weights.formats.common import Writers, write_new
from lockstep.weights.formats.lfs_pointers import refuse_stand_in
from lockstep.weights.formats.protobuf import make_messages, read_number, read_sizes

_MESSAGES = {
    "Version": "producer=1:int32 min_consumer=2:int32",
    "Header": "num_shards=1:int32 endianness=2:int32 version=3:Version",
    "Dim": "size=1:int64",
    "Shape": "dim=2:Dim* unknown_rank=3:bool",
    "Slice": "",
    "Entry": (
        "dtype=1:int32 shape=2:Shape shard_id=3:int32 offset=4:int64 size=5:int64 crc32c=6:fixed32"
        " slices=7:Slice*"
    ),
    "CheckpointState": "model_checkpoint_path=1:string all_model_checkpoint_paths=2:string*",
}
"""The needed parts of TensorFlow's tensor_bundle.proto, tensor_shape.proto, versions.proto and
checkpoint_state.proto."""
_message = make_messages("lockstep.bundle", _MESSAGES).__getitem__
"""Returns the class of a message."""

_VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: BFLOAT16,
    19: np.dtype("<f2"),
}
"""Dtypes by TensorFlow's number."""
DTYPE_NAMES = {number: dtype_name(dtype) for number, dtype in DTYPES.items()}
_OTHER_DTYPES = {
    **{4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64", 10: "bool", 17: "uint16"},
    **{18: "complex128", 20: "resource", 21: "variant", 22: "uint32", 23: "uint64"},
}
_WRITTEN_DTYPES = {dtype: number for number, dtype in DTYPES.items() if dtype != BFLOAT16}

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_BLOCK_BYTES = 262144
_RESTART_INTERVAL = 16
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
Pair = tuple[bytes, bytes]
"""A key and a value of the index."""
_ENDING = re.compile(r"(?<=.)\.(index|meta|data-[0-9]{5}-of-[0-9]{5})$")


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
        return DTYPE_NAMES.get(self.dtype) or _OTHER_DTYPES.get(self.dtype, str(self.dtype))


def index_path(prefix: Path) -> Path:
    """Return the path of a checkpoint's index."""
    return prefix.with_name(f"{prefix.name}.index")


def data_path(prefix: Path, shard: int, shards: int) -> Path:
    """Return the path of one of the files with the values."""
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")


def find(path: Path) -> Path | None:
    """Return the prefix of the checkpoint that a path names; None if there is none.

    A path is a prefix, one of its files, or a folder. The folder must have a single checkpoint, or
    a file `checkpoint` that names the newest. Raises `CheckpointError` if a folder has several
    checkpoints and none is named, or the named one is missing.
    """
    if path.is_dir():
        return _find_newest(path)
    prefix = path.with_name(_ENDING.sub("", path.name)) if path.name else path
    return prefix if prefix.name and index_path(prefix).is_file() else None


def _find_newest(folder: Path) -> Path | None:
    indices = filter(Path.is_file, folder.glob("*.index"))
    names = sorted(index.name.removesuffix(".index") for index in indices)
    state = folder / "checkpoint"
    if not state.is_file():
        if len(names) > 1:
            raise CheckpointError(
                f"{folder} has {', '.join(names)} and no file `checkpoint` that names the newest;"
                " name one"
            )
        return folder / names[0] if names else None
    try:
        text = read_regular_text(state, TEXT)
        newest = text_format.Parse(
            text, _message("CheckpointState")(), allow_unknown_field=True
        ).model_checkpoint_path
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise CheckpointError(
            f"{state} cannot be read: {error}; name one of {names} directly"
        ) from None
    # Training writes an absolute path if it was given one, and that is wrong as soon as the folder
    # is moved.
    prefix = folder / Path(newest).name
    if not newest or not index_path(prefix).is_file():
        raise CheckpointError(
            f"{state} names {newest!r}, which does not exist; name one of {names} directly"
        )
    return prefix


class Bundle:
    """A checkpoint opened for reading. Raises `CheckpointError`, here and in `read`, if it is
    damaged or incomplete."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        path = index_path(prefix)
        with naming_damage(path, "the index of a TensorFlow checkpoint"):
            refuse_stand_in(path)
            self._shards, self.entries = _read_index(read_pairs(Places(path)))
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
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{about} is of type {entry.dtype_name}; expected floats, int32 or int64"
            )
        dtype = DTYPES[entry.dtype]
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise CheckpointError(
                f"{about} has {entry.size} bytes, which does not fit its shape {entry.shape}"
            )
        data = self._read_bytes(entry, name)
        if masked_crc(data) != entry.crc:
            path = data_path(self.prefix, entry.shard, self._shards)
            raise CheckpointError(
                f"{about} is damaged: its checksum is wrong. Copy {path.name} again."
            )
        values = numbers(np.frombuffer(data, dtype).reshape(entry.shape))
        return values.astype(values.dtype.newbyteorder("="))

    def _read_bytes(self, entry: Entry, name: str) -> bytes:
        path = data_path(self.prefix, entry.shard, self._shards)
        with naming_damage(path, f"the file with the values of {name}"):
            if entry.shard not in self._files:
                refuse_stand_in(path)
                self._files[entry.shard] = Places(path)
            file = self._files[entry.shard]
            check_inside(file, entry.offset, entry.size)
            return file.read(entry.offset, entry.size)


def _read_index(pairs: Iterable[Pair]) -> tuple[int, dict[str, Entry]]:
    """Return the number of data files and the entries of their tensors. Raises `ValueError`."""
    stored = dict(pairs)
    if b"" not in stored:
        raise ValueError("it has no header")
    header = _parse("Header", stored.pop(b""))
    if header.endianness != 0:
        raise ValueError("its values are in big endian; save it again on a little-endian machine")
    if header.version.min_consumer > _VERSION:
        raise ValueError(
            f"it is of version {header.version.min_consumer}; expected at most {_VERSION}"
        )
    entries = {}
    for key, value in stored.items():
        # A key that begins with a zero byte is a slice of a partitioned variable. The variable
        # itself has another entry.
        if not key.startswith(b"\0"):
            name = key.decode("utf-8")
            entries[name] = _read_entry(name, value, header.num_shards)
    return header.num_shards, entries


def _read_entry(name: str, value: bytes, shards: int) -> Entry:
    entry = _parse("Entry", value)
    shape = read_sizes(entry.shape)
    is_whole = not entry.shape.unknown_rank and min((*shape, entry.offset, entry.size)) >= 0
    if not is_whole or not 0 <= entry.shard_id < shards:
        raise ValueError(f"its entry for {name} is not valid")
    place = (entry.shard_id, entry.offset, entry.size, entry.crc32c)
    return Entry(entry.dtype, shape, *place, len(entry.slices))


def _parse(name: str, data: bytes) -> Any:
    try:
        return _message(name).FromString(data)
    except DecodeError:
        raise ValueError(f"an entry is not a message of type {name}") from None


def write(
    prefix: Path, tensors: Mapping[str, np.ndarray], into: Path | None = None
) -> tuple[Path, Path]:
    """Write a checkpoint with one data file; return the index and the data file.

    The index is written last: without it there is no checkpoint. `into` is as in `write_new`.
    Raises `CheckpointError` if the checkpoint exists already or cannot be written, or if a tensor's
    dtype is not float16, float32, float64, int32 or int64.
    """
    for name, value in tensors.items():
        is_known = value.dtype.newbyteorder("<") in _WRITTEN_DTYPES
        if not name or name.startswith("\0") or not is_known:
            raise CheckpointError(
                f"{prefix}: {name!r} of type {value.dtype} cannot be written to a TensorFlow"
                " checkpoint"
            )
    index = index_path(prefix)
    data = data_path(prefix, 0, 1)
    entries = [(b"", _make_header())]
    files: Writers = {
        data: lambda path: entries.extend(_write_values(path, tensors)),
        index: lambda path: path.write_bytes(pack_table(entries)),
    }
    write_new(prefix, files, into=into)
    return index, data


def write_newest(prefix: Path, into: Path | None = None) -> Path:
    """Write the file `checkpoint`, by which TensorFlow finds a folder's newest checkpoint. `into`
    is as in `write_new`.

    Raises `CheckpointError` if the file exists already or cannot be written.
    """
    state = _message("CheckpointState")(
        model_checkpoint_path=prefix.name, all_model_checkpoint_paths=[prefix.name]
    )
    text = text_format.MessageToString(state, as_utf8=True)
    path = prefix.with_name("checkpoint")
    write_new(path, {path: lambda place: place.write_text(text, encoding="utf-8")}, into=into)
    return path


def _make_header() -> bytes:
    version = _message("Version")(producer=_VERSION)
    header = _message("Header")(num_shards=1, version=version)
    return bytes(header.SerializeToString(deterministic=True))


def _write_values(path: Path, tensors: Mapping[str, np.ndarray]) -> list[Pair]:
    """Write a data file; return the entries for the index, in order."""
    entries = []
    offset = 0
    with path.open("wb") as file:
        for name in sorted(tensors, key=str.encode):
            dtype = tensors[name].dtype.newbyteorder("<")
            data = np.ascontiguousarray(tensors[name], dtype).tobytes()
            file.write(data)
            sizes = [_message("Dim")(size=size) for size in tensors[name].shape]
            entry = _message("Entry")(
                dtype=_WRITTEN_DTYPES[dtype],
                shape=_message("Shape")(dim=sizes),
                offset=offset,
                size=len(data),
                crc32c=masked_crc(data),
            )
            entries.append((name.encode(), bytes(entry.SerializeToString(deterministic=True))))
            offset += len(data)
    return entries


# Tables of LevelDB


def read_pairs(file: Places) -> Iterator[Pair]:
    """Yield the keys and values of a table in ascending order of keys. Raises `ValueError` that
    says what is wrong."""
    if file.size < _FOOTER_BYTES:
        raise ValueError(f"it has {file.size} bytes, less than a footer")
    footer = file.read(file.size - _FOOTER_BYTES, _FOOTER_BYTES)
    if not footer.endswith(_UINT64.pack(_MAGIC)):
        raise ValueError("it does not end with the magic number of a table")
    places = io.BytesIO(footer)
    _read_block(file, places)  # about other kinds of blocks: empty, but its checksum counts
    last: bytes | None = None
    for _, place in _split_block(_read_block(file, places)):
        for key, value in _split_block(_read_block(file, io.BytesIO(place))):
            if last is not None and key <= last:
                raise ValueError("its names are not in order")
            last = key
            yield key, value


def _read_block(file: Places, place: io.BytesIO) -> bytes:
    """Return the contents of a block, whose offset and size are the next numbers of `place`, after
    verifying its checksum."""
    offset = read_number(place.read)
    size = read_number(place.read)
    check_inside(file, offset, size + _TRAILER_BYTES)
    data = file.read(offset, size + _TRAILER_BYTES)
    if masked_crc(data[: size + 1]) != _UINT32.unpack_from(data, size + 1)[0]:
        raise ValueError(f"the checksum of the block at byte {offset} is wrong")
    if data[size] != 0:
        raise ValueError(
            f"the block at byte {offset} is compressed, which TensorFlow never does; save it again"
        )
    return data[:size]


def check_inside(file: Places, offset: int, size: int) -> None:
    """Raise `ValueError` if a file does not have these bytes."""
    if offset + size > file.size:
        raise ValueError(f"bytes {offset} to {offset + size} are beyond its end at {file.size}")


def _split_block(block: bytes) -> Iterator[Pair]:
    if len(block) < _UINT32.size:
        raise ValueError("a block is empty")
    end = len(block) - _UINT32.size * (1 + _UINT32.unpack_from(block, len(block) - _UINT32.size)[0])
    if end < 0:
        raise ValueError("a block is truncated")
    entries = io.BytesIO(block)
    key = b""
    while entries.tell() < end:
        shared = read_number(entries.read)
        rest = read_number(entries.read)
        length = read_number(entries.read)
        if shared > len(key) or entries.tell() + rest + length > end:
            raise ValueError("an entry extends beyond its block")
        key = key[:shared] + entries.read(rest)
        yield key, entries.read(length)


def pack_table(pairs: list[Pair]) -> bytes:
    """Return a table of pairs. Their keys must be in ascending order."""
    table = bytearray()
    places = []
    for part in _divide(pairs):
        last_key = part[-1][0]
        places.append((last_key, _append_block(table, part, _RESTART_INTERVAL)))
    footer = _append_block(table, [], 1)
    footer += _append_block(table, places, 1)
    return bytes(table + footer.ljust(_FOOTER_BYTES - _UINT64.size, b"\0") + _UINT64.pack(_MAGIC))


def _divide(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs of each block."""
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


def _append_block(table: bytearray, pairs: Iterable[Pair], interval: int) -> bytes:
    """Append a block with its trailer; return its place, encoded. Every `interval`-th key is stored
    completely."""
    block = bytearray()
    restarts = [0]
    last = b""
    for i, (key, value) in enumerate(pairs):
        shared = _count_shared(last, key)
        if i % interval == 0:
            shared = 0
            if i:
                restarts.append(len(block))
        block += _pack_number(shared)
        block += _pack_number(len(key) - shared)
        block += _pack_number(len(value))
        block += key[shared:] + value
        last = key
    block += b"".join(map(_UINT32.pack, [*restarts, len(restarts)]))
    place = _pack_number(len(table)) + _pack_number(len(block))
    block += b"\0"
    table += block + _UINT32.pack(masked_crc(bytes(block)))
    return place


def _count_shared(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix of two keys in bytes."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _pack_number(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
