"""The parts that a file consists of, read without decoding: a JPEG's segments, the chunks of a PNG
or a WebP, a TIFF's entries.

Pillow takes time for every part, so the parts are counted before it opens a file.
"""

import re
import struct
from collections.abc import Iterator

JPEG_START = b"\xff\xd8"
"""The first bytes of every JPEG."""
START_OF_SCAN = 0xDA
_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""A marker that libjpeg also takes for one within the data of a scan. Others, and RST0 to RST7, do
not end a scan."""
_WITHOUT_LENGTH = (0xD8, 0xD9)
"""Markers that start and end an image. libjpeg refuses a second start."""
_PNG = b"\x89PNG\r\n\x1a\n"
_LAST_CHUNK = b"IEND"
_TIFF_ORDERS = {b"II": "<", b"MM": ">"}
_BIG_TIFF = 43
_TIFF_BYTES = (1, 2, 6, 7)
"""The types of a TIFF's entries whose values stay bytes when they are read."""


def list_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of every segment of a JPEG, and where its content starts and ends.

    They are found as libjpeg does: it skips bytes before a marker, and the data of scans.

    What follows the end of the image, or a second start, is not a part of it.
    """
    marker = _SEGMENT.search(data, len(JPEG_START))
    while marker is not None:
        start = marker.end()
        code = data[start - 1]
        if code in _WITHOUT_LENGTH:
            return
        end = start + max(int.from_bytes(data[start : start + 2], "big"), 2)
        yield code, start + 2, end
        marker = _SEGMENT.search(data, end)


def count_parts(data: bytes | memoryview, most: int) -> int:
    """Return the number of chunks of a PNG, or the number of entries in a TIFF's first directory or
    of values in the longest of them (strips or tiles); 0 for other formats.

    Counting stops above `most`, and where a file is damaged.
    """
    if data[:8] == _PNG:
        return _count_chunks(data, most)
    order = _TIFF_ORDERS.get(bytes(data[:2]))
    if order is None:
        return 0
    try:
        return _count_entries(data, order, most)
    except struct.error:  # the file ends too early
        return 0


def _count_chunks(data: bytes | memoryview, most: int) -> int:
    chunks = 0
    place = len(_PNG)
    while chunks <= most and place < len(data):
        chunks += 1
        if data[place + 4 : place + 8] == _LAST_CHUNK:
            break
        length = int.from_bytes(data[place : place + 4], "big")
        place += 12 + length  # with length, name and checksum
    return chunks


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
