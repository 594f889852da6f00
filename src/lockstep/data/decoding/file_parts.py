"""The number of parts that a PNG or a TIFF consists of, read without decoding.

Pillow takes time for every part, so the parts are counted before it opens a file.
"""

import struct

_PNG = b"\x89PNG\r\n\x1a\n"
_LAST_CHUNK = b"IEND"
_TIFF_ORDERS = {b"II": "<", b"MM": ">"}
_BIG_TIFF = 43
_TIFF_BYTES = (1, 2, 6, 7)
"""The types of a TIFF's entries whose values stay bytes when they are read."""


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
