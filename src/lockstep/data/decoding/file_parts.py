"""The parts that a file consists of, read without decoding: a JPEG's segments, a PNG's chunks, a
TIFF's entries.

Pillow takes time for every part, so the parts are counted before it opens a file.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from zlib import crc32

JPEG_START = b"\xff\xd8"
"""The first bytes of every JPEG."""
START_OF_SCAN = 0xDA
_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""A marker that libjpeg also accepts within the data of a scan. Other bytes, and RST0 to RST7, do
not end a scan."""
_WITHOUT_LENGTH = (0xD8, 0xD9)
"""Markers that start and end an image. libjpeg refuses a second start."""
PNG_START = b"\x89PNG\r\n\x1a\n"
_LAST_CHUNK = b"IEND"
_CRITICAL_CHUNKS = re.compile(rb"(?:IHDR(?:PLTE)?(?:IDAT)*(?:IEND)?)?")
_PALETTE_CHUNKS = re.compile(rb"(?:IHDR(?:PLTE(?:IDAT)*(?:IEND)?)?)?")
"""The names of a PNG's undamaged critical chunks, joined; of one whose pixels are numbers of a
palette."""
_COLOUR_TYPE_AT = 25
_PALETTE = 3
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
"""The last chunk of every PNG."""
_IS_ANCILLARY = 0x20
"""The bit of a chunk's first letter that is set if a decoder may do without the chunk."""
_TIFF_ORDERS = {b"II": "<", b"MM": ">"}
_BIG_TIFF = 43
_TIFF_BYTES = (1, 2, 6, 7)
"""The types of a TIFF's entries whose values stay bytes when they are read."""


def list_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of every segment of a JPEG, and where its content starts and ends.

    They are found as libjpeg does: it skips bytes before a marker, and the data of scans. What
    follows the end of the image, or a second start, is not a part of it.
    """
    marker = _SEGMENT.search(data, len(JPEG_START))
    while marker is not None:
        start = marker.end()
        code = data[start - 1]
        if code in _WITHOUT_LENGTH:
            return
        end = start + int.from_bytes(data[start : start + 2], "big")
        yield code, start + 2, end
        marker = _SEGMENT.search(data, end)


def count_parts(data: bytes | memoryview, most: int) -> int:
    """Return the number of chunks of a PNG, or the number of entries in a TIFF's first directory or
    of values in the longest of them (strips or tiles); 0 for other formats.

    Counting stops above `most`, and where a file is damaged.
    """
    if data[:8] == PNG_START:
        return sum(1 for _ in islice(list_png_chunks(data), most + 1))
    order = _TIFF_ORDERS.get(bytes(data[:2]))
    if order is None:
        return 0
    try:
        return _count_entries(data, order, most)
    except struct.error:  # the file ends too early
        return 0


def list_png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of every chunk of a PNG, and where its content starts and ends, up to the last
    chunk or to the one that the file ends in."""
    place = len(PNG_START)
    name = b""
    while place + 8 <= len(data) and name != _LAST_CHUNK:
        name = bytes(data[place + 4 : place + 8])
        start = place + 8
        end = start + int.from_bytes(data[place : place + 4], "big")
        yield name, start, end
        place = end + 4  # after the checksum


def sift_png(data: bytes | memoryview, names: Sequence[bytes] = ()) -> tuple[bytes, list[str]]:
    """Return a PNG without the ancillary chunks that fail their checksum, as libpng reads it, and
    their names. With `names`, it has only chunks of these names; others are not checked.

    Other formats are returned unchanged. Raises `ValueError` with the name of a critical chunk that
    fails its checksum, and if the critical chunks are not the usual ones.
    """
    damaged: list[str] = []
    critical = []
    if data[: len(PNG_START)] != PNG_START:
        return bytes(data), damaged
    view = memoryview(data)
    kept = [memoryview(PNG_START)]
    for name, start, end in list_png_chunks(data):
        if names and name not in names:
            continue
        checksum = view[end : end + 4]  # if the file ends too early, there is none to compare
        if len(checksum) == 4 and crc32(view[start - 4 : end]) != int.from_bytes(checksum, "big"):
            damaged.append(name.decode("latin-1"))
            if not name[0] & _IS_ANCILLARY:
                raise ValueError(
                    f"the checksum of a PNG's chunk {damaged[-1]} is wrong: its data is damaged;"
                    " replace the file"
                )
        else:
            kept.append(view[start - 8 : end + 4])
            if len(checksum) == 4 and not name[0] & _IS_ANCILLARY:
                critical.append(name)
    has_palette = data[_COLOUR_TYPE_AT : _COLOUR_TYPE_AT + 1] == bytes([_PALETTE])
    chunks = _PALETTE_CHUNKS if has_palette else _CRITICAL_CHUNKS
    if not names and not chunks.fullmatch(b"".join(critical)):
        raise ValueError(
            "a PNG's critical chunks must be IHDR, one PLTE (optional unless pixels use a palette),"
            " IDAT and IEND, in this order; save the image again"
        )
    if not damaged and not names:
        return bytes(data), damaged
    if names:
        kept.append(memoryview(PNG_END))
    return b"".join(kept), damaged


def check_start(data: bytes) -> None:
    """Raise `ValueError` if a WebP has fewer bytes than its header says, and for BigTIFFs that
    Pillow misreads."""
    size = 8 + int.from_bytes(data[4:8], "little")
    if data[:4] + data[8:12] == b"RIFFWEBP" and len(data) < size:
        raise ValueError(f"truncated: it has {len(data):,} of {size:,} bytes")
    if data[:4] == b"MM\0+":
        raise ValueError("a BigTIFF in big-endian order is not supported; save it as PNG")


def _count_entries(data: bytes | memoryview, order: str, most: int) -> int:
    is_big = data[2:3] == bytes([_BIG_TIFF])  # where Pillow looks, in both byte orders
    number, entry = (order + "Q", order + "HHQ8x") if is_big else (order + "H", order + "HHI4x")
    (place,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
    (entries,) = struct.unpack_from(number, data, place)
    longest = entries
    place += struct.calcsize(number)
    for _ in range(min(entries, most)):
        _, kind, values = struct.unpack_from(entry, data, place)
        if kind not in _TIFF_BYTES:
            longest = max(longest, values)
        place += struct.calcsize(entry)
    return longest
