"""Sorted tables of keys and values in LevelDB's format.

- A table is blocks of entries, a block with their places, and a footer with the place of that
  block.
- An entry is three lengths (of the part that its key shares with the key before, of the rest of its
  key, of its value), the rest of the key, and the value.
- A block ends with the places of its complete keys, their number, a byte for the compression, and a
  masked CRC-32C.

Every checksum is verified.

Source: tensorflow/core/lib/io/table_format.txt.
"""

import io
import struct
from collections.abc import Iterable, Iterator

from lockstep.data.containers.places import Places
from lockstep.system.crc import masked_crc
from lockstep.weights.formats.protobuf import read_number

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_BLOCK_BYTES = 262144
_RESTART_INTERVAL = 16
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")

Pair = tuple[bytes, bytes]


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
