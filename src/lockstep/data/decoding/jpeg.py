"""Decode a part of a baseline JPEG with our own C code, `_jpeg.c`, which documents the method.

It is faster than libjpeg-turbo and gives the same pixels to the last bit. Rare and damaged files
are left to libjpeg-turbo.
"""

import importlib
import os
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep.data.decoding.size_limits import USUAL

Window = tuple[int, int, int, int]
"""Top, left, height, width in pixels."""
SWITCH = "LOCKSTEP_JPEG"
"""Environment variable: with "libjpeg", libjpeg-turbo decodes all JPEGs."""

_jpeg: Any = None
if os.environ.get(SWITCH) != "libjpeg":
    with suppress(ImportError):
        _jpeg = importlib.import_module("lockstep.data.decoding._jpeg")

MISSING = (
    "it needs GCC 12 when the package is built (or the wheel for Linux on x86-64), and a processor"
    " with AVX2; libjpeg-turbo decodes instead, with the same pixels"
)


class _Buffers(threading.local):
    """A thread's working memory, with the last image's tables, and its output: up to six bytes for
    each pixel of the largest window.
    """

    room = np.zeros(0, np.uint8)
    pixels = np.empty(0, np.uint8)


_of_thread = _Buffers()


def is_there() -> bool:
    """Return whether the decoder was built and runs on this machine."""
    return _jpeg is not None


def decode_window(data: bytes, size: tuple[int, int], window: Window) -> np.ndarray | None:
    """Return a window of a JPEG whose height and width are `size`: uint8 RGB [height, width, 3].

    The array is valid until the same thread decodes again. Raises `ValueError` if the window is not
    within the image. Returns None if libjpeg-turbo must decode the file:

    - the decoder is not available;
    - the window has more than `USUAL` pixels (the thread would keep the memory);
    - the file is of a rare kind or damaged.
    """
    _, _, height, width = window
    if _jpeg is None or height * width > USUAL:
        return None
    buffers = _of_thread
    room, pixels = _jpeg.sizes(len(data), height, width)
    if buffers.room.size < room:
        buffers.room = np.zeros(room, np.uint8)
    if buffers.pixels.size < pixels:
        buffers.pixels = np.empty(pixels, np.uint8)
    if not _jpeg.decode_window(data, size, window, buffers.room, buffers.pixels):
        return None
    return buffers.pixels[: height * width * 3].reshape(height, width, 3)
