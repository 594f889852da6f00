"""The orientation of a photo: how its EXIF data says that the stored image is to be turned before
it is shown.

A camera that is held on its side stores the image as its sensor has it, and a number from 1 to 8
(JEITA CP-3451, tag 0x0112). Recipes with `exif_orientation` see the image as it is shown.
"""

import io
import struct
from itertools import count, islice

import cv2
import numpy as np
from PIL import Image

from lockstep.data.decoding.image_formats import BOX, readable_formats
from lockstep.data.decoding.jpeg import Window

UPRIGHT = 1
"""The orientation of an image that is shown as it is stored."""
_SWAPS = (5, 6, 7, 8)
"""Orientations whose image is shown with rows as columns. What follows applies to the image after
that."""
_REVERSES_ROWS = (3, 4, 7, 8)
_REVERSES_COLUMNS = (2, 3, 6, 7)

_TAG = 0x0112
_VALUES = {1: "B", 3: "H"}
"""TIFF's types BYTE and SHORT, as `struct` has them. EXIF has SHORT; DALI takes these two."""
_EXIF = b"Exif\0\0"
_PNG = b"\x89PNG\r\n\x1a\n"
_WEBP = b"WEBP"
_START = 0xD8
_SCAN = 0xDA
_END = 0xD9
_APP1 = 0xE1
_ALONE = (0x00, 0x01, *range(0xD0, _START + 1))
"""Markers of JPEG without a length."""
_MOST_SEGMENTS = 1000
"""Several times what any camera or program writes before the pixels. A made file could have
millions."""


def read_orientation(data: bytes) -> int:
    """Return the EXIF orientation of an encoded image, 1 to 8; 1 if it has none or an invalid one.

    Nothing is decoded. A TIFF gives 1: Pillow turns it while it decodes. XMP is not read.
    """
    try:
        return _parse_orientation(_find_exif(data))
    except struct.error:  # it ends too early
        return UPRIGHT


def _find_exif(data: bytes) -> bytes:
    """Return the EXIF data of an image, a TIFF file without pixels; empty if there is none. Raises
    `struct.error`."""
    if data[:2] == b"\xff\xd8":
        return _find_exif_in_jpeg(data)
    if data.startswith(_PNG):
        at = data.find(b"eXIf")
        if at <= 0:
            return b""
        (length,) = struct.unpack_from(">I", data, at - 4)
        return data[at + 4 : at + 4 + length]
    if data[8:12] == _WEBP:
        at = data.rfind(b"EXIF")  # it is after the pixels
        return data[at + 8 :].removeprefix(_EXIF) if at > 0 else b""
    if data[4:8] == BOX:
        return _find_exif_by_pillow(data)
    return b""


def _find_exif_by_pillow(data: bytes) -> bytes:
    """Return the EXIF data of a HEIC or AVIF. Pillow puts AVIF's own orientation into it; its
    plug-in for HEIC turns images while it decodes, and leaves none."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            exif = image.info.get("exif")
    except Exception:  # a damaged file makes Pillow's readers raise almost anything
        return b""
    return exif.removeprefix(_EXIF) if isinstance(exif, bytes) else b""


def _find_exif_in_jpeg(data: bytes) -> bytes:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        at = data.find(b"\xff", at)  # decoders skip bytes before a marker
        if at < 0:
            break
        marker, length = struct.unpack_from(">BH", data, at + 1)
        if marker in (_SCAN, _END):
            break
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker == _APP1 and data.startswith(_EXIF, at + 4):
            return data[at + 4 + len(_EXIF) : at + 2 + length]
        else:
            at += 2 + length
    return b""


def _parse_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data; 1 if there is none or an invalid one. Raises
    `struct.error`."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return UPRIGHT
    (start,) = struct.unpack_from(order + "I", exif, 4)
    (tags,) = struct.unpack_from(order + "H", exif, start)
    for at in islice(count(start + 2, 12), tags):
        tag, kind = struct.unpack_from(order + "HH", exif, at)
        if tag == _TAG:
            if kind not in _VALUES:
                break
            (value,) = struct.unpack_from(order + _VALUES[kind], exif, at + 8)
            return value if value in range(1, 9) else UPRIGHT
    return UPRIGHT


def add_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Return a JPEG without EXIF data with an orientation."""
    exif = _EXIF + struct.pack("<4sIHHHIHHI", b"II*\0", 8, 1, _TAG, 3, 1, orientation, 0, 0)
    return jpeg[:2] + struct.pack(">BBH", 0xFF, _APP1, 2 + len(exif)) + exif + jpeg[2:]


def shown_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return height and width of an image as it is shown; `size` is that of the stored one, or the
    reverse."""
    return size[::-1] if orientation in _SWAPS else size


def shown_sizes(sizes: np.ndarray, orientations: np.ndarray) -> np.ndarray:
    """Return heights and widths [N, 2] of images as they are shown; `sizes` are those of the stored
    ones."""
    return np.where(np.isin(orientations, _SWAPS)[:, None], sizes[:, ::-1], sizes)


def find_stored_window(window: Window, size: tuple[int, int], orientation: int) -> Window:
    """Return where a window of the shown image is in the stored image, whose height and width are
    `size`."""
    top, left, height, width = window
    shown_height, shown_width = shown_size(size, orientation)
    if orientation in _REVERSES_ROWS:
        top = shown_height - top - height
    if orientation in _REVERSES_COLUMNS:
        left = shown_width - left - width
    return (left, top, width, height) if orientation in _SWAPS else (top, left, height, width)


def turn_image(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image or a window of it as it is shown: uint8 [height, width, 3]; `pixels` itself
    if it is upright."""
    rows = orientation in _REVERSES_ROWS
    columns = orientation in _REVERSES_COLUMNS
    if orientation in _SWAPS:
        # Rows are reversed several times faster than columns, and columns are rows before they are
        # swapped.
        pixels = cv2.transpose(cv2.flip(pixels, 0) if columns else pixels)
        return cv2.flip(pixels, 0) if rows else pixels
    if rows and columns:
        return cv2.flip(pixels, -1)
    if rows:
        return cv2.flip(pixels, 0)
    return cv2.flip(pixels, 1) if columns else pixels
