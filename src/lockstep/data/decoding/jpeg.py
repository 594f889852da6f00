"""Decoding a part of a baseline JPEG, in C of our own: `_jpeg.c`, which says how.

It gives the pixels of libjpeg-turbo to the last bit, faster, and leaves to it what is rare or damaged.
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
"""Environment variable: "libjpeg" leaves all JPEGs to libjpeg-turbo."""

_jpeg: Any = None
if os.environ.get(SWITCH) != "libjpeg":
    with suppress(ImportError):
        _jpeg = importlib.import_module("lockstep.data.decoding._jpeg")

MISSING = (
    "it takes GCC 12 when the package is built (or the wheel for Linux on x86-64), and AVX2; libjpeg-turbo does its work, "
    "with the same pixels"
)


class _Buffers(threading.local):
    """Memory that a thread decodes in, with the last image's tables, and to: up to six bytes a pixel of the largest."""

    room = np.zeros(0, np.uint8)
    pixels = np.empty(0, np.uint8)


_of_thread = _Buffers()


def is_there() -> bool:
    """Tell whether the decoder was built, and runs here."""
    return _jpeg is not None


def decode_window(data: bytes, size: tuple[int, int], window: Window) -> np.ndarray | None:
    """Return a window of a JPEG whose height and width are `size`: uint8 RGB [height, width, 3].

    The array is valid until the same thread decodes again. None if the decoder is not there, the window has more than usual
    pixels (its thread would keep the memory), or the file is of a kind, or
    damaged in a way, that is left to libjpeg-turbo. Raises `ValueError` if the window is not within the image.
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
