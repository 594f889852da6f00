"""The probe photos of a proof: drawn, and encoded as files of the kinds that decoders treat
differently.

Each has strong colours, fine detail, and nothing that is the same left and right, or above and
below.
"""

import io
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lockstep.data.decoding.orientation import add_orientation
from lockstep.data.textures import PATTERNS, draw_texture

_QUALITY = 90
_LARGE = 1000
"""Photos with a longer side have coarse detail and a lower quality: their files are small."""


def _encode(image: Image.Image, form: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def _encode_jpeg(image: Image.Image) -> bytes:
    quality = _QUALITY - 30 * (max(image.size) > _LARGE)
    return _encode(image, "JPEG", quality=quality)


def _encode_progressive(image: Image.Image) -> bytes:
    return _encode(image, "JPEG", quality=_QUALITY, progressive=True)


def _turn(orientation: int) -> Callable[[Image.Image], bytes]:
    return lambda image: add_orientation(_encode_jpeg(image), orientation)


def _encode_cmyk(image: Image.Image) -> bytes:
    return _encode_jpeg(image.convert("CMYK"))


def _encode_grey(image: Image.Image) -> bytes:
    return _encode_jpeg(image.convert("L"))


def _encode_png(image: Image.Image) -> bytes:
    return _encode(image, "PNG")


def _encode_palette(image: Image.Image) -> bytes:
    return _encode_png(image.quantize(64))


def _encode_alpha(image: Image.Image) -> bytes:
    """Return a PNG that is transparent from the left to the right, over strong colours."""
    transparency = np.linspace(255, 0, image.width).astype(np.uint8)
    image.putalpha(Image.fromarray(np.tile(transparency, (image.height, 1))))
    return _encode_png(image)


class Photo(NamedTuple):
    """A probe photo."""

    file: str
    what: str
    """What is special about it, in words."""
    width: int
    height: int
    encode: Callable[[Image.Image], bytes]


PHOTOS = (
    Photo("plain.jpg", "a JPEG", 320, 240, _encode_jpeg),
    Photo("fine.jpg", "a progressive JPEG with fine lines", 640, 520, _encode_progressive),
    Photo("tall.jpg", "a tall JPEG", 200, 460, _encode_jpeg),
    Photo("wide.jpg", "a wide JPEG", 560, 180, _encode_jpeg),
    Photo("large.jpg", "a large JPEG", 1600, 1200, _encode_jpeg),
    Photo("second.jpg", "a JPEG of the same size", 320, 240, _encode_jpeg),
    Photo("tiny.png", "a tiny PNG", 20, 14, _encode_png),
    Photo("turned.jpg", "a JPEG turned by EXIF", 360, 240, _turn(6)),
    Photo("upside-down.jpg", "a JPEG turned upside down by EXIF", 240, 300, _turn(3)),
    Photo("cmyk.jpg", "a CMYK JPEG", 300, 260, _encode_cmyk),
    Photo("grey.jpg", "a grey JPEG", 260, 300, _encode_grey),
    Photo("alpha.png", "a PNG with transparency", 200, 160, _encode_alpha),
    Photo("palette.png", "a PNG with a palette", 180, 220, _encode_palette),
)


@cache
def draw_photo(number: int) -> bytes:
    """Return the file of one of `PHOTOS`."""
    photo = PHOTOS[number]
    return photo.encode(_draw(photo.width, photo.height, number))


def _draw(width: int, height: int, number: int) -> Image.Image:
    """Return a scene: a gradient, two textures, and lines of one to three pixels."""
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    hue = (2 * np.pi * (number * 0.381966 + np.arange(3) / 3)).astype(np.float32)
    ramp = (0.7 * columns / width + 0.3 * rows / height)[..., None]
    pixels = 127.5 + 120 * np.cos(hue + 4 * ramp)
    kinds = sorted(PATTERNS)
    for place, (top, left) in enumerate(((0.08, 0.05), (0.5, 0.62))):
        texture = draw_texture(kinds[(number + 3 * place) % len(kinds)], number)
        size = (max(width * 3 // 10, 1), max(height * (4 - place) // 10, 1))
        part = np.asarray(Image.fromarray(texture).resize(size, Image.Resampling.BILINEAR))
        first_row, first_column = int(top * height), int(left * width)
        pixels[first_row : first_row + size[1], first_column : first_column + size[0]] = part
    coarse = 1 + 11 * (max(width, height) > _LARGE)
    area = np.s_[int(0.62 * height) : int(0.95 * height), int(0.04 * width) : int(0.5 * width)]
    lines = (columns[area] + rows[area] * (number % 3)) // coarse % (2 + number % 2) < 1
    pixels[area] = np.where(lines[..., None], 255 - pixels[area], pixels[area])
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
