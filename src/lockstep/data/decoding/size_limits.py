"""The budget for decoding an image: bytes, pixels, scans and parts; and the pixels that all threads
decode at the same time.

A few bytes can claim any number of pixels, and decoding takes memory and time for all of them. A
JPEG can store its pixels in many scans, and every scan takes time for all pixels, however few bytes
it has. A file of another format can consist of millions of parts, and Pillow takes time for each.
Every function that decodes checks this budget first. Of an animation only the first frame is
decoded, so the number of frames costs nothing.

Time within the budget, on one core of 2.5 GHz: 1.5 ns for each pixel of a scan, so 4 s for the
most; 40 ns for each byte of a JPEG; for 100 million pixels of other formats 12 s for a PNG with
four channels of 16 bits or a HEIC of noise, 10 s for an AVIF of noise. Other formats take less.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep.data.decoding.file_parts import count_parts

MOST_PIXELS = 2 * (1024**3 // 4 // 3)
"""The limit for JPEGs, which can be decoded reduced or as a window in little memory: Pillow's own
limit, 178,956,970."""
MOST_PIXELS_IN_WHOLE = 100_000_000
"""The limit for other formats, which are decoded as a whole: 4 to 10 bytes for each pixel."""
MOST_PIXELS_A_SIDE = 2**20
"""The limit for height and width of other formats. An image one pixel wide takes 26 bytes for each
pixel."""
MOST_PARTS = 2**18
"""Chunks of a PNG, and entries or strips or tiles of a TIFF: as many as a TIFF of 65,536 rows has
with one strip for each row and channel. PNGs have chunks of 8 KiB or more."""
MOST_HEADER_BYTES = 2**22
"""What precedes the first frame of a GIF or the pixels of a PPM. Pillow reads it byte by byte or in
blocks of up to 255 bytes."""
MOST_SLOW_PIXELS = 2**21
"""The limit for what Pillow decodes in Python: BMPs with run lengths; PPMs in text, or with values
up to another limit than 255."""
MOST_SLOW_BYTES = 2**25
MOST_COMMENTS = 1000
"""Comments of a PPM in text. Each takes time for up to 1 MiB."""
MOST_RATIO = 256
"""The limit for one side over the other. A narrow strip of few pixels can become any number of them
when its shorter side is resized: 256 x 65,536 at this limit."""
SMALL = 2**22
"""This many pixels are allowed in a file of any size, because decoding them is quick."""
USUAL = 2**25
"""Most cameras' photos have at most this many pixels. Every thread may decode such an image without
waiting."""
MOST_PIXELS_A_BYTE = 2**14
"""The limit of pixels for each byte of a file. A PNG of a blank page with one bit a pixel has half
as many. A file with more is crafted to take time."""
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
MOST_SEGMENT_BYTES = 2**25
"""The limit of bytes of these segments together. Pillow's time grows with their square."""


class OverBudget(ValueError):
    """An image takes more than its share of memory or time."""


class TooManyPixels(OverBudget):
    """An image has more pixels than allowed."""


def check_bytes(data: bytes | memoryview) -> None:
    """Raise `OverBudget` if a file has more bytes or parts than an image of any size may have.

    It is checked before the header is parsed, which takes Pillow time for each part.
    """
    if len(data) > MOST_BYTES:
        raise OverBudget(
            f"{len(data):,} bytes are too many: at most {MOST_BYTES:,}; reduce the image"
        )
    if count_parts(data, MOST_PARTS) > MOST_PARTS:
        raise OverBudget(
            f"more than {MOST_PARTS:,} parts of a PNG or TIFF are too many; save the image again"
        )


def check_size(height: int, width: int, size: int, most: int = MOST_PIXELS_IN_WHOLE) -> None:
    """Raise `OverBudget` if a file of `size` bytes has more pixels, or more bytes for its pixels,
    than allowed.

    `most` is the format's limit of pixels. The error of too many pixels is `TooManyPixels`.
    """
    pixels = height * width
    if most == MOST_PIXELS_IN_WHOLE and max(height, width) > MOST_PIXELS_A_SIDE:
        raise TooManyPixels(
            f"{width} x {height} pixels are too many on one side: at most {MOST_PIXELS_A_SIDE:,};"
            " reduce the image"
        )
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


def check_ratio(height: int, width: int, source: Sequence[int] = ()) -> None:
    """Raise `TooManyPixels` if an image is a strip that no resize should enlarge. `source` is
    height and width of the image that is to get this size."""
    if height > MOST_RATIO * width or width > MOST_RATIO * height:
        height, width = source or (height, width)
        raise TooManyPixels(
            f"{width} x {height} pixels are too many on one side: the longer side may be at most"
            f" {MOST_RATIO} times the shorter; crop the image"
        )


def check_slow_format(data: bytes | memoryview, pixels: int) -> None:
    """Raise `OverBudget` if an image that Pillow decodes in Python has more pixels, bytes or
    comments than allowed."""
    if pixels > MOST_SLOW_PIXELS or len(data) > MOST_SLOW_BYTES:
        raise OverBudget(
            f"{pixels:,} pixels or {len(data):,} bytes are too many for a BMP with run lengths, or"
            f" a PPM in text or not of 8 bits: at most {MOST_SLOW_PIXELS:,} and"
            f" {MOST_SLOW_BYTES:,}; save the image as PNG"
        )
    if data[:2] in (b"P1", b"P2", b"P3") and bytes(data).count(b"#") > MOST_COMMENTS:
        raise OverBudget(f"more than {MOST_COMMENTS:,} comments are too many; save the image again")


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
