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

BITS_PER_SAMPLE = 258
COMPRESSION = 259
PHOTOMETRIC = 262
PLANAR = 284
SAMPLE_FORMAT = 339
SUBSAMPLING = 530
_UNSIGNED = 1
_FORMATS = {
    _UNSIGNED: "unsigned integers",
    2: "signed integers",
    3: "floating-point numbers",
    5: "complex integers",
    6: "complex numbers",
}
"""What a TIFF's samples are, by the values of `SAMPLE_FORMAT`."""
_BITS = {1, 2, 4, 8, 12, 16}
_WHITE_IS_ZERO = 0
_YCBCR = 6
_SEPARATE = 2
_UNCOMPRESSED = 1
_WIDE_GREY = ("PNG", "PPM")
"""Formats whose 16 bits of grey Pillow may keep in 32."""
_DEPTH = 16
_HIGHEST = 2**_DEPTH - 1
_TIFF_STARTS = (b"II", b"MM")
_OTHER_ORDER = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
"""The last letter of Pillow's name for 16 bits, and the one that gives the lower byte."""
_WIDE_COLOURS = ("RGB;16", "RGBA;16", "RGBX;16", "CMYK;16")
_GREY_AND_ALPHA = "LA;16B"


def check_tiff(tags: Mapping[int, Any]) -> None:
    """Raise `ValueError` with the kind of a TIFF's samples if they have no known range, or if
    Pillow reads them wrongly."""
    bits = tuple(tags.get(BITS_PER_SAMPLE, (1,)))
    is_raw = tags.get(COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
    is_separate = tags.get(PLANAR) == _SEPARATE and max(bits) > 8
    is_sparse = tags.get(PHOTOMETRIC) == _YCBCR and tags.get(SUBSAMPLING) != (1, 1)
    is_unsigned = set(tags.get(SAMPLE_FORMAT, ())) <= {_UNSIGNED}
    if not is_unsigned or not set(bits) <= _BITS or (is_raw and (is_separate or is_sparse)):
        raise ValueError(explain_tiff(tags))


def explain_tiff(tags: Mapping[int, Any]) -> str:
    """Return why a TIFF is not decoded, by its tags."""
    kinds = sorted(set(tags.get(SAMPLE_FORMAT, (_UNSIGNED,))))
    names = [_FORMATS.get(kind, f"the format {kind}") for kind in kinds]
    bits = tags.get(BITS_PER_SAMPLE, (1,))
    return (
        f"a TIFF of {' and '.join(names)} of {'+'.join(map(str, bits))} bits (photometric"
        f" interpretation {tags.get(PHOTOMETRIC)}, planar configuration {tags.get(PLANAR, 1)},"
        f" compression {tags.get(COMPRESSION, _UNCOMPRESSED)}) is not supported; expected unsigned"
        " integers of 8 or 16 bits; scale it and save it as PNG"
    )


def read_tiff_tags(data: bytes | memoryview) -> Mapping[int, Any]:
    """Return the tags of a TIFF's first image; empty for other formats or if they are damaged."""
    if data[:2] not in _TIFF_STARTS:
        return {}
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
    highest = 2 ** max(tags.get(BITS_PER_SAMPLE, (_DEPTH,))) - 1
    grey = np.minimum(np.asarray(image), highest)
    if tags.get(PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = highest - grey
    return Image.fromarray(_scale(grey, highest))


def _scale(values: np.ndarray, highest: int) -> np.ndarray:
    """Return v * 255 / highest, rounded to the nearest: uint8."""
    return ((values.astype(np.uint32) * 255 + highest // 2) // highest).astype(np.uint8)


def load_colours(
    image: ImageFile.ImageFile, open_again: Callable[[], ImageFile.ImageFile]
) -> Image.Image:
    """Load an image of Pillow, and return it, or one of 8 bits if it has colours of 16 bits.

    Pillow loads the upper byte of such colours. With the name of the other byte order, it loads the
    lower one of an image that is opened again.
    """
    tiles = []
    kind = ""
    for tile in image.tile:
        args = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        kind = str(args[0]) if args else ""
        other = ""
        if kind == _GREY_AND_ALPHA:
            other = "RGBA"  # four bytes: the upper and the lower one of either
        elif kind[:-1] in _WIDE_COLOURS:
            other = kind[:-1] + _OTHER_ORDER[kind[-1]]
        tiles.append((*tile[:3], (other, *args[1:]) if args[1:] else other))
    image.load()
    if kind != _GREY_AND_ALPHA and kind[:-1] not in _WIDE_COLOURS:
        return image
    lower = open_again()
    lower.tile = [type(tile)(*new) for tile, new in zip(lower.tile, tiles, strict=True)]
    lower.load()
    low = np.asarray(lower)
    if kind == _GREY_AND_ALPHA:
        low = low[:, :, 1:2]
    scaled = _scale(np.asarray(image).astype(np.uint32) * 256 + low, _HIGHEST)
    return Image.frombytes(image.mode, image.size, scaled.tobytes())
