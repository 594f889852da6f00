"""Limits for decoding: the size of an image, and the pixels that all threads decode at the same time.

A few bytes can claim any number of pixels, and decoding takes memory and time for all of them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PIXELS = 2 * (1024**3 // 4 // 3)
"""The limit for JPEGs, which can be decoded reduced or as a window in little memory: Pillow's own limit, 178,956,970."""
MOST_PIXELS_IN_WHOLE = 100_000_000
"""The limit for other formats, which are decoded as a whole: 4 to 10 bytes for each pixel."""
SMALL = 2**22
"""Up to this many pixels are allowed for any number of bytes, because decoding them is quick."""
USUAL = 2**25
"""Most cameras' photos have at most this many pixels. Every thread may decode such an image without waiting."""
MOST_PIXELS_A_BYTE = 2**14
"""The limit of pixels for each byte of a file. A PNG of a blank page with one bit a pixel has half as many. A file with more
is made to take time."""


class TooManyPixels(ValueError):
    """An image has more pixels than allowed."""


def check_size(height: int, width: int, size: int, most: int = MOST_PIXELS_IN_WHOLE) -> None:
    """Raise `TooManyPixels` if a file of `size` bytes claims more pixels than allowed. `most` is the format's limit."""
    pixels = height * width
    if pixels > most:
        kind = "" if most == MOST_PIXELS else f" unless it is a JPEG ({MOST_PIXELS:,})"
        raise TooManyPixels(f"{width} x {height} pixels are too many: at most {most:,}{kind}; reduce the image")
    if pixels > max(SMALL, MOST_PIXELS_A_BYTE * size):
        raise TooManyPixels(f"{width} x {height} pixels are too many for a file of {size} bytes")


class _Decoding:
    """The number of pixels that all threads are decoding, in images above `USUAL`."""

    def __init__(self) -> None:
        self._pixels = 0
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, pixels: int) -> Iterator[None]:
        """Make an image above `USUAL` wait until all such have at most `MOST_PIXELS` together, or there are no others."""
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
