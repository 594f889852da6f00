"""The probe photos of a proof: drawn, and encoded as files of the kinds that decoders treat
differently.

Each has strong colours and fine detail, and no symmetry between left and right, or top and bottom.
"""

import io
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lockstep.data.decoding.orientation import UPRIGHT, add_orientation
from lockstep.data.textures import PATTERNS, draw_texture

_LARGE = 1000
"""Photos with a longer side have coarse detail, so that their files are small."""


class Photo(NamedTuple):
    """A probe photo."""

    file: str
    what: str
    """What is special about it, in words."""
    width: int
    height: int
    mode: str = "RGB"
    """Pillow's name for how it is stored."""
    orientation: int = UPRIGHT
    """The orientation in a JPEG's EXIF data."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """How Pillow encodes it."""

    def encode(self, image: Image.Image) -> bytes:
        """Return the file with a scene."""
        if self.mode == "RGBA":  # transparent from the left to the right
            alpha = np.linspace(255, 0, self.width).astype(np.uint8)
            image.putalpha(Image.fromarray(np.tile(alpha, (self.height, 1))))
        stored = image.quantize(64) if self.mode == "P" else image.convert(self.mode)
        file = io.BytesIO()
        if self.file.endswith(".png"):
            stored.save(file, "PNG")
            return file.getvalue()
        stored.save(file, "JPEG", **({"quality": 90} | dict(self.settings)))
        data = file.getvalue()
        return data if self.orientation == UPRIGHT else add_orientation(data, self.orientation)


PHOTOS = (
    Photo("plain.jpg", "a JPEG", 320, 240),
    Photo("fine.jpg", "a progressive JPEG", 640, 520, settings={"progressive": True}),
    Photo("tall.jpg", "a tall JPEG", 200, 460),
    Photo("wide.jpg", "a wide JPEG", 560, 180),
    Photo("large.jpg", "a large JPEG", 1600, 1200, settings={"quality": 60}),
    Photo("second.jpg", "a JPEG of the same size", 320, 240),
    Photo("tiny.png", "a tiny PNG", 20, 14),
    Photo("turned.jpg", "a JPEG turned by EXIF", 360, 240, orientation=6),
    Photo("upside-down.jpg", "a JPEG turned upside down by EXIF", 240, 300, orientation=3),
    Photo("cmyk.jpg", "a CMYK JPEG", 300, 260, "CMYK"),
    Photo("grey.jpg", "a grey JPEG", 260, 300, "L"),
    Photo("alpha.png", "a PNG with transparency", 200, 160, "RGBA"),
    Photo("palette.png", "a PNG with a palette", 180, 220, "P"),
)
"""The first ones show most mistakes."""


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
