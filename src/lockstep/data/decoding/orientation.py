"""The orientation of a photo: how its EXIF data or XMP says that the stored image is to be turned
before it is shown.

A camera that is held on its side stores the image as its sensor has it, and a number from 1 to 8
(JEITA CP-3451, tag 0x0112). Recipes with `exif_orientation` see the image as it is shown.
"""

import re
import struct
from collections.abc import Iterator
from itertools import count, islice

import cv2
import numpy as np

from lockstep.data.decoding.decode import open_by_pillow
from lockstep.data.decoding.file_parts import JPEG_START, PNG_START, START_OF_SCAN, list_segments
from lockstep.data.decoding.image_formats import BOX
from lockstep.data.decoding.jpeg import Window

UPRIGHT = 1
"""The orientation of an image that is shown as it is stored."""
_SWAPS = (5, 6, 7, 8)
"""Orientations whose image is shown with rows as columns. What follows applies to the image after
that."""
_REVERSES_ROWS = (3, 4, 7, 8)
_REVERSES_COLUMNS = (2, 3, 6, 7)
FLIPS = {(True, False): 1, (False, True): 0, (True, True): -1}
"""OpenCV's codes for flips: left to right, upside down."""

_TAG = 0x0112
_VALUES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""TIFF's integer types, as `struct` has them. EXIF has the second, SHORT."""
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([0-9])")
_PNG_METADATA = (b"IHDR", b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_RAW_PROFILES = ("Raw profile type exif", "Raw profile type APP1")
"""The keywords of the texts in which ImageMagick writes EXIF data to a PNG."""
_WEBP = b"WEBP"
_APP1 = 0xE1
_MOST_SEGMENTS = 1000
"""Several times what any camera or program writes before the pixels. A crafted file could have
millions."""


def read_orientation(data: bytes) -> int:
    """Return the orientation of an encoded image, 1 to 8; 1 if it has none or an invalid one.

    It is that of the EXIF data, else of the XMP. Nothing is decoded. A TIFF gives 1: Pillow turns
    it while it decodes.
    """
    exif = xmp = b""
    if data[:2] == JPEG_START:
        exif, xmp = _find_in_jpeg(data)
    elif data.startswith(PNG_START) or data[8:12] == _WEBP or data[4:8] == BOX:
        exif, xmp = _find_by_pillow(data)
    try:
        value = _parse_orientation(exif.removeprefix(_EXIF).removeprefix(_EXIF))
    except struct.error:  # it ends too early
        value = None
    match = _XMP_ORIENTATION.search(xmp)
    if value is None and match is not None:
        value = int(match[1])
    if value is None or value not in range(1, 9):
        return UPRIGHT
    return value


def _find_in_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Return EXIF data, a TIFF file without pixels, and XMP; empty if there is none."""
    exif = []  # large EXIF data has several segments
    xmp = b""
    for start, end in _list_app1(data):
        if data.startswith(_EXIF, start):
            exif.append(data[start + len(_EXIF) : end])
        elif data.startswith(_XMP, start):
            xmp = data[start:end]
    return b"".join(exif), xmp


def _list_app1(jpeg: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the content of the segments for EXIF data and XMP starts and ends."""
    for code, start, end in islice(list_segments(jpeg), _MOST_SEGMENTS):
        if code == START_OF_SCAN:
            return
        if code == _APP1:
            yield start, end


def _find_by_pillow(data: bytes) -> tuple[bytes, bytes]:
    """Return EXIF data and XMP of a PNG, WebP, HEIC or AVIF. Pillow puts AVIF's own orientation
    into the EXIF data; its plug-in for HEIC turns images while it decodes, and leaves none."""
    try:
        image = open_by_pillow(data, _PNG_METADATA)
        exif = image.info.get("exif") or b""
        xmp = b""
        if image.format != "HEIF":
            xmp = image.info.get("xmp") or b""
        for name in _RAW_PROFILES:
            if not exif:
                # behind an empty line, the name and the length
                lines = image.info.get(name, "").split("\n")[3:]
                exif = bytes.fromhex("".join(lines))
    except Exception:  # a damaged file makes Pillow's readers raise almost anything
        return b"", b""
    return exif, xmp


def _parse_orientation(exif: bytes) -> int | None:
    """Return the value of the orientation in EXIF data; None if there is none. Raises
    `struct.error`."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    (start,) = struct.unpack_from(order + "I", exif, 4)
    (tags,) = struct.unpack_from(order + "H", exif, start)
    for at in islice(count(start + 2, 12), tags):
        tag, kind, values = struct.unpack_from(order + "HHI", exif, at)
        if tag == _TAG:
            if kind not in _VALUES or values != 1:
                return UPRIGHT
            (value,) = struct.unpack_from(order + _VALUES[kind], exif, at + 8)
            return int(value)
    return None


def add_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Return a JPEG without EXIF data with an orientation."""
    exif = _EXIF + struct.pack("<4sIHHHIHHI", b"II*\0", 8, 1, _TAG, 3, 1, orientation, 0, 0)
    return jpeg[:2] + struct.pack(">BBH", 0xFF, _APP1, 2 + len(exif)) + exif + jpeg[2:]


def replace_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Return a JPEG with an orientation, and other EXIF data hidden, for a decoder that reads
    it."""
    other = bytearray(jpeg)
    for start, _ in _list_app1(jpeg):
        if jpeg.startswith(_EXIF, start):
            other[start] = 0
    if orientation == UPRIGHT:
        return bytes(other)
    return add_orientation(bytes(other), orientation)


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
        if columns:
            pixels = cv2.flip(pixels, 0)
        pixels = cv2.transpose(pixels)
        columns = False
    if rows or columns:
        pixels = cv2.flip(pixels, FLIPS[columns, rows])
    return pixels
