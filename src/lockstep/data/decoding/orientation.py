"""The orientation of a photo: how its EXIF data or XMP says that the stored image is to be turned
before it is shown.

A camera that is held on its side stores the image as its sensor has it, and a number from 1 to 8
(JEITA CP-3451, tag 0x0112). Recipes with `exif_orientation` see the image as it is shown.
"""

import io
import re
import struct
import zlib
from contextlib import suppress
from itertools import count, islice

import cv2
import numpy as np
from PIL import Image

from lockstep.data.decoding.file_parts import (
    JPEG_START,
    PNG_START,
    START_OF_SCAN,
    is_damaged,
    list_png_chunks,
    list_segments,
    list_webp_chunks,
)
from lockstep.data.decoding.image_formats import BOX, readable_formats
from lockstep.data.decoding.jpeg import Window
from lockstep.data.decoding.size_limits import MOST_PARTS

UPRIGHT = 1
"""The orientation of an image that is shown as it is stored."""
_SWAPS = (5, 6, 7, 8)
"""Orientations whose image is shown with rows as columns. What follows applies to the image after
that."""
_REVERSES_ROWS = (3, 4, 7, 8)
_REVERSES_COLUMNS = (2, 3, 6, 7)

_TAG = 0x0112
_VALUES = {1: "B", 3: "H", 4: "I", 8: "h", 9: "i"}
"""TIFF's integer types, as `struct` has them. EXIF has the second, SHORT."""
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_RAW_PROFILE = b"Raw profile type exif"
"""The keyword of the text in which ImageMagick writes EXIF data to a PNG."""
_PNG_XMP = b"XML:com.adobe.xmp"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_MOST_TEXT = 2**20
_WEBP = b"WEBP"
_WEBP_FLAGS = {b"EXIF": 0x08, b"XMP ": 0x04}
"""The bits of a WebP's header that are set if it has these chunks."""
_APP1 = 0xE1
_MOST_SEGMENTS = 1000
"""Several times what any camera or program writes before the pixels. A made file could have
millions."""
Metadata = tuple[bytes, bytes]
"""EXIF data, a TIFF file without pixels, and XMP; empty if there is none."""


def read_orientation(data: bytes) -> int:
    """Return the orientation of an encoded image, 1 to 8; 1 if it has none or an invalid one.

    It is that of the EXIF data, else of the XMP. Nothing is decoded. A TIFF gives 1: Pillow turns
    it while it decodes.
    """
    exif, xmp = _find_metadata(data)
    try:
        value = _parse_orientation(exif.removeprefix(_EXIF))
    except struct.error:  # it ends too early
        value = None
    match = _XMP_ORIENTATION.search(xmp)
    if value is None and match is not None:
        value = int(match[1])
    if value is None or value not in range(1, 9):
        return UPRIGHT
    return value


def _find_metadata(data: bytes) -> Metadata:
    if data[:2] == JPEG_START:
        return _find_in_jpeg(data)
    if data.startswith(PNG_START):
        return _find_in_png(data)
    if data[8:12] == _WEBP:
        return _find_in_webp(data)
    if data[4:8] == BOX:
        return _find_by_pillow(data)
    return b"", b""


def _find_by_pillow(data: bytes) -> Metadata:
    """Return the metadata of a HEIC or AVIF. Pillow puts AVIF's own orientation into the EXIF data;
    its plug-in for HEIC turns images while it decodes, and leaves none."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            exif = image.info.get("exif") or b""
            xmp = image.format == "AVIF" and image.info.get("xmp")
    except Exception:  # a damaged file makes Pillow's readers raise almost anything
        return b"", b""
    return exif, xmp or b""


def _find_in_jpeg(data: bytes) -> Metadata:
    exif = []  # large EXIF data has several segments
    xmp = b""
    for code, start, end in islice(list_segments(data), _MOST_SEGMENTS):
        if code == START_OF_SCAN:
            break
        if code == _APP1 and data.startswith(_EXIF, start):
            exif.append(data[start + len(_EXIF) : end])
        elif code == _APP1 and data.startswith(_XMP, start):
            xmp = data[start:end]
    return b"".join(exif), xmp


def _find_in_png(data: bytes) -> Metadata:
    exif = b""
    texts: dict[bytes, bytes] = {}
    for chunk in islice(list_png_chunks(data), MOST_PARTS):
        name, start, end = chunk
        if name == b"eXIf" and not is_damaged(data, chunk):
            exif = data[start:end]
        if name in _TEXTS:
            keyword, _, text = data[start:end].partition(b"\0")
            is_first = keyword in (_RAW_PROFILE, _PNG_XMP) and keyword not in texts
            if is_first and not is_damaged(data, chunk):
                texts[keyword] = _read_text(name, text)
    if not exif and _RAW_PROFILE in texts:
        lines = texts[_RAW_PROFILE].split(b"\n")[3:]  # behind an empty line, the name, the length
        with suppress(ValueError):
            exif = bytes.fromhex(b"".join(lines).decode("latin-1"))
    return exif, texts.get(_PNG_XMP, b"")


def _find_in_webp(data: bytes) -> Metadata:
    """Return the metadata of a WebP; as in libwebp, its header must say that there are such."""
    flags = 0
    chunks: dict[bytes, bytes] = {}
    for name, start, end in islice(list_webp_chunks(data), MOST_PARTS):
        if name == b"VP8X":
            flags |= int.from_bytes(data[start : start + 1], "big")
        elif flags & _WEBP_FLAGS.get(name, 0):
            chunks.setdefault(name, data[start:end])
    return chunks.get(b"EXIF", b""), chunks.get(b"XMP ", b"")


def _read_text(name: bytes, text: bytes) -> bytes:
    """Return the text behind a keyword in a PNG's chunk, up to 1 MiB; empty if it is damaged."""
    is_compressed = name == b"zTXt"
    text = text[is_compressed:]  # without the method of compression
    if name == b"iTXt":
        is_compressed = text[:1] == b"\1"
        text = text[2:].split(b"\0", 2)[-1]  # behind the method, a language and a translation
    if not is_compressed:
        return text
    try:
        return zlib.decompressobj().decompress(text, _MOST_TEXT)
    except zlib.error:
        return b""


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
    """Return a JPEG with an orientation, and no other EXIF data, for a decoder that reads it."""
    kept = []
    place = 0
    for code, start, end in islice(list_segments(jpeg), _MOST_SEGMENTS):
        if code == START_OF_SCAN:
            break
        if code == _APP1 and jpeg.startswith(_EXIF, start):
            kept.append(jpeg[place : start - 4])
            place = end
    if kept:
        jpeg = b"".join((*kept, jpeg[place:]))
    if orientation == UPRIGHT:
        return jpeg
    return add_orientation(jpeg, orientation)


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
