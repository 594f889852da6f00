"""The range of an image's samples, by the tags of its own file.

Unsigned integers of n bits are scaled to 8: v * 255 / (2 ** n - 1), rounded to the nearest. White
is 0 where a TIFF says so. Signed integers, floating-point numbers and integers of 32 bits have no
range that a file states, and are refused.
"""

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin

_BITS = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_PLANAR = 284
_FORMAT = 339
_SUBSAMPLING = 530
_UNSIGNED = 1
_FORMATS = {2: "signed integers", 3: "floating-point numbers", 5: "complex", 6: "complex numbers"}
"""What a TIFF's samples are, by the values of `_FORMAT`; others are unsigned integers."""
_KNOWN_BITS = {1, 2, 4, 8, 12, 16}
_WHITE_IS_ZERO = 0
_YCBCR = 6
_SEPARATE = 2
_ROWS = 64
_WIDE_GREY = ("PNG", "PPM")
"""Formats whose 16 bits of grey Pillow may keep in 32."""
_NATIVE = {"little": "B", "big": "L"}[sys.byteorder]
_LOWER_BYTE = {"LA;16B": "RGBA"}
"""Pillow's names for the data of colours with 16 bits, of which it takes the upper byte, and those
by which it takes the lower one. Of grey with transparency it takes all four bytes."""
for _colours in ("RGB;16", "RGBA;16", "RGBX;16", "CMYK;16"):
    for _order, _other in {"B": "L", "L": "B", "N": _NATIVE}.items():
        _LOWER_BYTE[_colours + _order] = _colours + _other


def check_tiff(tags: Mapping[int, Any]) -> None:
    """Raise `ValueError` with the kind of a TIFF's samples if they have no known range, or if
    Pillow reads them wrongly."""
    bits = tuple(tags.get(_BITS, (1,)))
    is_separate = tags.get(_PLANAR) == _SEPARATE and max(bits) > 8
    is_sparse = tags.get(_PHOTOMETRIC) == _YCBCR and tags.get(_SUBSAMPLING) != (1, 1)
    is_misread = tags.get(_COMPRESSION, 1) == 1 and (is_separate or is_sparse)
    is_unsigned = set(tags.get(_FORMAT, ())) <= {_UNSIGNED}
    if is_misread or not is_unsigned or not set(bits) <= _KNOWN_BITS:
        raise ValueError(explain_tiff(tags))


def explain_tiff(tags: Mapping[int, Any]) -> str:
    """Return why a TIFF is not decoded, by its tags."""
    kind = _FORMATS.get(max(tags.get(_FORMAT, (_UNSIGNED,))), "unsigned integers")
    return (
        f"a TIFF of {kind} of {'+'.join(map(str, tags.get(_BITS, (1,))))} bits (photometric"
        f" interpretation {tags.get(_PHOTOMETRIC)}, planar configuration {tags.get(_PLANAR, 1)},"
        f" compression {tags.get(_COMPRESSION, 1)}) is not supported; expected unsigned integers of"
        " 8 or 16 bits; scale it and save it as PNG"
    )


def read_tiff_tags(data: bytes | memoryview) -> Mapping[int, Any]:
    """Return the tags of a TIFF's first image; empty for other formats or if they are damaged."""
    try:
        file = io.BytesIO(data)
        tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(8))
        file.seek(tags.next)
        tags.load(file)
    except Exception:  # a damaged file makes Pillow's readers raise almost anything
        return {}
    return tags


def scale_grey(image: Image.Image, source: Image.Image) -> Image.Image:
    """Return a grey image of up to 16 bits with 8; others unchanged. `source` is the image as
    Pillow opened it.

    Raises `ValueError` if its values have no known range.
    """
    tags: Mapping[int, Any] = getattr(source, "tag_v2", {})
    if tags:
        check_tiff(tags)
    if image.mode == "F" or (image.mode == "I" and source.format not in _WIDE_GREY):
        raise ValueError(
            f"an image of Pillow's mode {image.mode}, 32 bits, is not supported; scale it to 0 to"
            " 255 and save it as PNG of 8 bits"
        )
    if not image.mode.startswith("I"):
        return image
    levels = _scale(np.asarray(image), 2 ** max(tags.get(_BITS, (16,))) - 1)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        levels = 255 - levels
    return Image.fromarray(levels)


def _scale(values: np.ndarray, highest: int, lower: np.ndarray | None = None) -> np.ndarray:
    """Return v * 255 / highest, rounded to the nearest: uint8. With `lower`, `values` are upper
    bytes. The memory besides is that of some rows."""
    levels = np.empty(values.shape, np.uint8)
    for first in range(0, len(values), _ROWS):
        rows = slice(first, first + _ROWS)
        part = values[rows].astype(np.uint32)
        if lower is not None:
            part = part * 256 + lower[rows]
        levels[rows] = (part * 255 + highest // 2) // highest
    return levels


def load_colours(
    image: ImageFile.ImageFile, open_again: Callable[[], ImageFile.ImageFile]
) -> Image.Image:
    """Load an image of Pillow, and return it, or one of 8 bits if it has colours of 16 bits."""
    kind: Any = ""
    for tile in image.tile[:1]:
        kind = tile[3]
        if isinstance(kind, tuple):  # the name is the first of several
            kind = kind[0]
    image.load()
    if kind not in _LOWER_BYTE:
        return image
    lower = open_again()
    tiles = []
    for tile in lower.tile:
        changed: Any = _LOWER_BYTE[kind]
        if isinstance(tile[3], tuple):
            changed = (changed, *tile[3][1:])
        tiles.append(type(tile)(*tile[:3], changed))
    lower.tile = tiles
    lower.load()
    low = np.asarray(lower)
    if kind == "LA;16B":
        low = low[:, :, 1:2]
    scaled = _scale(np.asarray(image), 65535, low)
    return Image.frombytes(image.mode, image.size, scaled.tobytes())
