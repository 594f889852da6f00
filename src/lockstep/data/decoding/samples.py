"""The range of an image's samples, by the tags of its own file.

Unsigned integers of n bits are scaled to 8: v * 255 / (2 ** n - 1), rounded to the nearest. White
is 0 where a TIFF says so. Signed integers, floating-point numbers and integers of 32 bits have no
range that a file states, and are refused.
"""

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin
from PIL.ExifTags import Base

from lockstep.data.decoding.file_parts import PNG_END, PNG_START

_FORMATS = {2: "signed integers", 3: "floating-point numbers", 5: "complex", 6: "complex numbers"}
"""What a TIFF's samples are, by its tag; others are unsigned integers."""
_KNOWN_BITS = {1, 2, 4, 8, 12, 16}
_BIG_TIFF = 43
_WHITE_IS_ZERO = 0
_YCBCR = 6
_SEPARATE = 2
_ROWS = 64
_WIDE_GREY = ("PNG", "PPM")
"""Formats whose 16 bits of grey Pillow may keep in 32."""
_NATIVE = {"little": "B", "big": "L"}[sys.byteorder]
_LOWER_BYTES = {"LA;16B": "RGBA"}
"""Pillow's names for the data of colours with 16 bits, of which it takes the upper byte, and those
by which it takes the lower one. Of grey with transparency it takes all four bytes."""
for _colours in ("RGB;16", "RGBA;16", "RGBX;16", "CMYK;16"):
    for _order, _other in {"B": "L", "L": "B", "N": _NATIVE}.items():
        _LOWER_BYTES[_colours + _order] = _colours + _other


def check_tiff(tags: Mapping[int, Any], *, is_readable: bool = True) -> None:
    """Raise `ValueError` with the kind of a TIFF's samples if they have no known range, or if
    Pillow reads them wrongly or not at all; never without tags."""
    bits = tuple(tags.get(Base.BitsPerSample, (1,)))
    kinds = set(tags.get(Base.SampleFormat, (1,)))
    colours = tags.get(Base.PhotometricInterpretation)
    planes = tags.get(Base.PlanarConfiguration, 1)
    compression = tags.get(Base.Compression, 1)
    is_separate = planes == _SEPARATE and max(bits) > 8
    is_sparse = colours == _YCBCR and compression == 1 and tags.get(Base.YCbCrSubSampling) != (1, 1)
    is_known = kinds == {1} and set(bits) <= _KNOWN_BITS
    if tags and not (is_readable and is_known and not is_separate and not is_sparse):
        raise ValueError(
            f"a TIFF of {_FORMATS.get(max(kinds), 'unsigned integers')} of"
            f" {'+'.join(map(str, bits))} bits (photometric interpretation {colours}, planar"
            f" configuration {planes}, compression {compression}) is not supported; expected grey"
            " or RGB in unsigned integers of 8 or 16 bits; scale it and save it as PNG"
        )


def read_tiff_tags(data: bytes | memoryview) -> Mapping[int, Any]:
    """Return the tags of a TIFF's first image; empty for other formats or if they are damaged."""
    try:
        file = io.BytesIO(data)
        start = file.read(8)
        if start[2] == _BIG_TIFF:
            start += file.read(8)
        tags = TiffImagePlugin.ImageFileDirectory_v2(start)
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
    check_tiff(tags)
    if image.mode == "F" or (image.mode == "I" and source.format not in _WIDE_GREY):
        raise ValueError(
            f"a Pillow image of mode {image.mode}, 32 bits, is not supported; scale it to 0 to 255"
            " and save it as 8-bit PNG"
        )
    if not image.mode.startswith("I"):
        return image
    highest = 2 ** max(tags.get(Base.BitsPerSample, (16,))) - 1
    values = np.asarray(image)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)  # OpenCV ignores the order
    levels = cv2.convertScaleAbs(values, alpha=255 / highest)
    if tags.get(Base.PhotometricInterpretation) == _WHITE_IS_ZERO:
        levels = 255 - levels
    return Image.fromarray(levels)


def load_colours(image: ImageFile.ImageFile, reopen: Callable[[], ImageFile.ImageFile]) -> None:
    """Load a Pillow image, and scale 16-bit colours to v / 257, rounded to the nearest."""
    tiles = image.tile
    image.load()
    swapped = [_swap_bytes(tile) for tile in tiles]
    if swapped == tiles:
        return
    lower = reopen()
    lower.tile = swapped
    lower.load()
    for top in range(0, image.height, _ROWS):
        box = (0, top, image.width, min(top + _ROWS, image.height))
        high = np.asarray(image.crop(box))
        low = np.asarray(lower.crop(box))
        if swapped[0][3] == "RGBA":  # the bytes of grey, then of transparency
            low = low[:, :, 1:2].repeat(4, 2)
        levels = high + (cv2.subtract(low, high) > 128) - (cv2.subtract(high, low) > 128)
        image.paste(Image.frombytes(image.mode, high.shape[1::-1], levels.tobytes()), box)


def check_last_rows(data: bytes, rows: np.ndarray) -> None:
    """Raise `ValueError` if a PNG ends before its last two rows, `rows`: Pillow leaves
    missing rows at 0, and libpng refuses the file. The last row to be read is one of the two.
    """
    varied = (rows != rows[:, :1]).reshape(len(rows), -1).any(1)
    if not data.startswith(PNG_START) or varied.all():
        return
    if cv2.imdecode(np.frombuffer(data + PNG_END, np.uint8), cv2.IMREAD_GRAYSCALE) is None:
        raise ValueError("not enough image data: a PNG ends before its last row")


def _swap_bytes(tile: Any) -> Any:
    """Return a part of an image for Pillow to decode, with the lower bytes of colours of 16 bits
    where the upper ones are."""
    *place, kind = tile
    if isinstance(kind, tuple):  # the name is one of several arguments
        kind = tuple(_LOWER_BYTES.get(argument, argument) for argument in kind)
    else:
        kind = _LOWER_BYTES.get(kind, kind)
    return tuple.__new__(type(tile), (*place, kind))
