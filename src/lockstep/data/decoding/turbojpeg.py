"""Decoding a part of a JPEG with libjpeg-turbo's own interface, TurboJPEG 3, through ctypes: what `jpeg` leaves to it.

What is left of a full decode's work is reading the codes of the rows above the window's lower edge; pixels are those of a
full decode, to the last bit. The library is the system's, or the one in the `turbojpeg` package.
"""

import ctypes
import ctypes.util
import threading
from functools import cache
from importlib import util
from pathlib import Path

import numpy as np

INSTALL = (
    "pip install turbojpeg==0.0.2 (Python 3.11 to 3.13, Linux on x86-64), or the system's libturbojpeg 3; "
    "until then whole images are decoded"
)
Window = tuple[int, int, int, int]
"""Top, left, height, width in pixels."""

# turbojpeg.h of libjpeg-turbo 3
_DECOMPRESS = 1
_SUBSAMPLING, _JPEG_WIDTH, _JPEG_HEIGHT, _COLOUR_SPACE = 4, 5, 6, 8
_RGB = 0
_YCBCR, _GREY = 1, 2
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""Of a block of pixels that is decoded as one, by `_SUBSAMPLING`."""
_CONTEXT_ROWS = 2
"""Rows beside the window that smooth upsampling of its colours may look at."""


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class _Scale(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("num", "denom")]


@cache
def library() -> ctypes.CDLL | None:
    """Return TurboJPEG 3, or None where there is none."""
    for path in _candidates():
        try:
            found = ctypes.CDLL(path)
            found.tj3SetCroppingRegion.argtypes = (ctypes.c_void_p, _Region)
            found.tj3SetScalingFactor.argtypes = (ctypes.c_void_p, _Scale)
        except (OSError, AttributeError):  # not there, or an older one
            continue
        data = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
        found.tj3Init.restype = ctypes.c_void_p
        found.tj3Get.argtypes = (ctypes.c_void_p, ctypes.c_int)
        found.tj3DecompressHeader.argtypes = data
        found.tj3Decompress8.argtypes = (*data, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        found.tj3Destroy.argtypes = (ctypes.c_void_p,)
        return found
    return None


def _candidates() -> list[str]:
    system = ctypes.util.find_library("turbojpeg")
    package = util.find_spec("turbojpeg")
    beside = Path(package.origin).parent / "turbojpeg.libs" if package is not None and package.origin else Path()
    return [*([system] if system else []), *map(str, sorted(beside.glob("libturbojpeg*.so*")))]


class _Decoder:
    """A decompressor and its buffer; one for each thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = library.tj3Init(_DECOMPRESS)
        self.buffer = np.empty(0, np.uint8)

    def __del__(self) -> None:
        self.library.tj3Destroy(self.handle)

    def room(self, size: int) -> np.ndarray:
        if self.buffer.size < size:
            self.buffer = np.empty(size, np.uint8)
        return self.buffer[:size]


_of_thread = threading.local()


def _decoder() -> _Decoder | None:
    found = library()
    if found is None:
        return None
    if not hasattr(_of_thread, "decoder"):
        _of_thread.decoder = _Decoder(found)
    return _of_thread.decoder


def decode_window(data: bytes, size: tuple[int, int], window: Window, reduction: int = 1) -> np.ndarray | None:
    """Return a window of a JPEG whose height and width are `size`: uint8 RGB [height, width, 3].

    With a `reduction` of 2, 4 or 8 the image is decoded at that fraction of its size (rounded up), and the window is of the
    smaller image. The array is valid until the same thread decodes again. None if the library is missing, or the file is
    of a kind, or damaged in a way, that is left to a full decode.
    """
    decoder = _decoder()
    if decoder is None:
        return None
    turbo, handle = decoder.library, decoder.handle
    if turbo.tj3DecompressHeader(handle, data, len(data)) != 0:
        return None
    subsampling = turbo.tj3Get(handle, _SUBSAMPLING)
    if (
        (turbo.tj3Get(handle, _JPEG_HEIGHT), turbo.tj3Get(handle, _JPEG_WIDTH)) != size
        or turbo.tj3Get(handle, _COLOUR_SPACE) not in (_YCBCR, _GREY)
        or not 0 <= subsampling < len(_BLOCK_WIDTHS)
    ):
        return None
    top, left, height, width = window
    rows, columns = -(-size[0] // reduction), -(-size[1] // reduction)
    block = _BLOCK_WIDTHS[subsampling] // reduction
    # A region begins at a border of blocks; one block more on each side gives the window's edge its true neighbours.
    x, x_end = max(left // block - 1, 0) * block, min(left + width + block, columns)
    y, y_end = max(top - _CONTEXT_ROWS, 0), min(top + height + _CONTEXT_ROWS, rows)
    turbo.tj3SetCroppingRegion(handle, _Region(0, 0, 0, 0))  # the last image's, which need not fit another scale
    if turbo.tj3SetScalingFactor(handle, _Scale(1, reduction)) != 0:
        return None
    if turbo.tj3SetCroppingRegion(handle, _Region(x, y, x_end - x, y_end - y)) != 0:
        return None
    pixels = decoder.room((y_end - y) * (x_end - x) * 3).reshape(y_end - y, x_end - x, 3)
    if turbo.tj3Decompress8(handle, data, len(data), pixels.ctypes.data, 0, _RGB) != 0:
        return None
    return pixels[top - y : top - y + height, left - x : left - x + width]
