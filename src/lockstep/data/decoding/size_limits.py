"""How large an image may be that is decoded, and how much of all threads' is decoded at once.

A few bytes can claim any number of pixels, and what decodes them takes memory and time for all of them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PIXELS = 2 * (1024**3 // 4 // 3)
"""Of a JPEG, of which a reduced image or a window is decoded in little memory: Pillow's own limit, 178,956,970."""
MOST_PIXELS_IN_WHOLE = 100_000_000
"""Of other formats, which are decoded in whole: 4 to 10 bytes a pixel."""
SMALL = 2**22
"""Pixels that are decoded in a moment, however few bytes they are claimed in."""
USUAL = 2**25
"""Pixels of photos as most cameras take them: of these as many are decoded at once as there are threads."""
MOST_PIXELS_A_BYTE = 2**14
"""A blank page of one bit a pixel has half as many in a PNG; more is made to take time."""


def check_size(height: int, width: int, size: int, most: int = MOST_PIXELS_IN_WHOLE) -> None:
    """Raise `ValueError` if a file of `size` bytes claims more pixels than are decoded."""
    pixels = height * width
    if pixels > most:
        kind = "" if most == MOST_PIXELS else f" unless it is a JPEG ({MOST_PIXELS:,})"
        raise ValueError(f"{width} x {height} pixels are too many: at most {most:,}{kind}; reduce the image")
    if pixels > max(SMALL, MOST_PIXELS_A_BYTE * size):
        raise ValueError(f"{width} x {height} pixels are too many for a file of {size} bytes")


class _Decoding:
    """The pixels that all threads are decoding."""

    def __init__(self) -> None:
        self._pixels = 0
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, pixels: int) -> Iterator[None]:
        """Wait with more than usual pixels until all such are `MOST_PIXELS` together at most, or there are no others."""
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
"""`with decoding(pixels):` around what decodes them. A thread that is in one begins no other."""
