"""The budget for decoding an image: bytes, pixels and scans; and the pixels that all threads decode
at the same time.

A few bytes can claim any number of pixels, and decoding takes memory and time for all of them. A
JPEG can store its pixels in many scans, and every scan takes time for all pixels, however few bytes
it has. Every function that decodes checks this budget first. Of an animation only the first frame
is decoded, so the number of frames costs nothing.

Time within the budget, on one core of 2.5 GHz: 1.5 ns for each pixel of a scan, so 4 s for the
most; 40 ns for each byte of a JPEG; 0.3 s for each MB of a file of another format that is made of
the smallest parts.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PIXELS = 2 * (1024**3 // 4 // 3)
"""The limit for JPEGs, which can be decoded reduced or as a window in little memory: Pillow's own
limit, 178,956,970."""
MOST_PIXELS_IN_WHOLE = 100_000_000
"""The limit for other formats, which are decoded as a whole: 4 to 10 bytes for each pixel."""
JPEG_START = b"\xff\xd8"
"""The first bytes of every JPEG."""
MOST_RESIZED = 2**24
"""The limit for an image after the resize of an evaluation, unless four squares of `eval_resize`
have more: a strip that is 256 times as long as wide at 256 pixels. Resizing to the limit takes 0.2
s and 0.2 GB."""
SMALL = 2**22
"""Up to this many pixels are allowed for any number of bytes, because decoding them is quick."""
USUAL = 2**25
"""Most cameras' photos have at most this many pixels. Every thread may decode such an image without
waiting."""
MOST_PIXELS_A_BYTE = 2**14
"""The limit of pixels for each byte of a file. A PNG of a blank page with one bit a pixel has half
as many. A file with more is made to take time."""
MOST_BYTES = 2**30
"""The limit of bytes of a file."""
MOST_BYTES_BESIDES = 2**26
"""A file has at most this many bytes for metadata, layers, further frames and whatever follows the
image,"""
MOST_BYTES_A_PIXEL = 16
"""and this many for each pixel: four channels of 32 bits. A JPEG of noise at the best quality has
about 3."""
MOST_SCANS = 100
"""Scans of a JPEG. libjpeg writes 10 for a progressive photo and 18 for one in CMYK. Its tools
write at most 100."""
MOST_SCANNED_PIXELS = 16 * MOST_PIXELS
"""Pixels times scans. The largest JPEG may have the scans of any of libjpeg's own scripts for three
colours (10 or 14)."""
MOST_SEGMENTS = 10_000
"""Segments of a JPEG: its tables, profiles and comments. Photos have fewer than 300."""
_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""A marker that libjpeg also takes for one within the data of a scan. Others, and RST0 to RST7, do
not end a scan."""
_START_OF_IMAGE = 0xD8
_END_OF_IMAGE = 0xD9
_START_OF_SCAN = 0xDA
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
"""The frames whose pixels are complete after one scan if it has all their colours; libjpeg refuses
a second one."""


class OverBudget(ValueError):
    """An image takes more than its share of memory or time."""


class TooManyPixels(OverBudget):
    """An image has more pixels than allowed."""


def check_bytes(data: bytes | memoryview) -> None:
    """Raise `OverBudget` if a file has more bytes or segments, or is a JPEG of more scans, than any
    size of image may have.

    It is checked before the header is parsed, which takes Pillow time for each segment.
    """
    if len(data) > MOST_BYTES:
        raise OverBudget(
            f"{len(data):,} bytes are too many: at most {MOST_BYTES:,}; reduce the image"
        )
    if data[:2] == JPEG_START:
        check_scans(data, 0, 0)


def check_size(height: int, width: int, size: int, most: int = MOST_PIXELS_IN_WHOLE) -> None:
    """Raise `OverBudget` if a file of `size` bytes has more pixels, or more bytes for its pixels,
    than allowed.

    `most` is the format's limit of pixels. The error of too many pixels is `TooManyPixels`.
    """
    pixels = height * width
    if pixels > most:
        kind = "" if most == MOST_PIXELS else f" unless it is a JPEG ({MOST_PIXELS:,})"
        raise TooManyPixels(
            f"{width} x {height} pixels are too many: at most {most:,}{kind}; reduce the image"
        )
    if pixels > max(SMALL, MOST_PIXELS_A_BYTE * size):
        raise TooManyPixels(f"{width} x {height} pixels are too many for a file of {size} bytes")
    if size > MOST_BYTES_BESIDES + MOST_BYTES_A_PIXEL * pixels:
        raise OverBudget(
            f"{size:,} bytes are too many for {width} x {height} pixels; save the image again"
        )


def check_scans(data: bytes | memoryview, height: int, width: int) -> None:
    """Raise `OverBudget` if a JPEG has more scans, or pixels times scans, or segments than allowed."""
    most = min(MOST_SCANS, MOST_SCANNED_PIXELS // max(height * width, 1))
    if count_scans(data, most) > most:
        pixels = f" of {width} x {height} pixels" if most < MOST_SCANS else ""
        raise OverBudget(f"more than {most} scans{pixels} are too many; save the image again")


def count_scans(data: bytes | memoryview, most: int) -> int:
    """Return how many scans libjpeg reads of a JPEG at most; `most` + 1 if there are more. Only
    markers are read.

    Raises `OverBudget` if there are more segments than allowed.
    """
    place = 2
    scans = 0
    colours: bytes | memoryview = b""
    for _ in range(MOST_SEGMENTS):
        marker = _SEGMENT.search(data, place)
        if marker is None:
            return scans
        place = marker.end()
        code = data[marker.end() - 1]
        if code in (_START_OF_IMAGE, _END_OF_IMAGE):  # libjpeg refuses the former
            return scans
        length = data[place : place + 2]
        first = data[place + 2 : place + 3]
        if code == _START_OF_SCAN:
            scans += 1
            if scans > most or (scans == 1 and first == colours):
                return scans
        elif code in _SEQUENTIAL:
            colours = data[place + 7 : place + 8]
        place += max(int.from_bytes(length, "big"), 2)
    raise OverBudget(
        f"more than {MOST_SEGMENTS:,} segments of a JPEG are too many; save the image again"
    )


class _Decoding:
    """The number of pixels that all threads are decoding, in images above `USUAL`."""

    def __init__(self) -> None:
        self._pixels = 0
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, pixels: int) -> Iterator[None]:
        """Make an image above `USUAL` wait until all such have at most `MOST_PIXELS` together, or
        there are no others."""
        if pixels <= USUAL:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._pixels or self._pixels + pixels <= MOST_PIXELS)
            self._pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self._pixels -= pixels
                self._changed.notify_all()


decoding = _Decoding()
"""Use as `with decoding(pixels):` around the decoding. A thread must not nest these blocks."""
