"""The formats of images that are decoded, and how their files are recognised."""

import re

FORMAT_OF = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".ppm", ".pgm", ".pbm", ".pnm"), "PPM"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".webp": "WEBP",
}
"""Pillow's name of the format, by the ending of an image's name."""
FORMATS = tuple(sorted(set(FORMAT_OF.values())))
"""The formats that are decoded: Pillow supports dozens, and starts another program for some of them
(EPS)."""
BEGINS_AS_IMAGE = re.compile(
    rb"\xff\xd8|\x89PNG|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*"
    rb"|P[1-6]\s+(?:#[^\n]*\n\s*)*\d",
    re.DOTALL,
)
"""Matches the first bytes of an image."""


def is_image_name(name: str) -> bool:
    """Return whether a name ends like that of an image, or has no ending.

    >>> is_image_name("IMG_1.JPG"), is_image_name("0a1b2c"), is_image_name("Thumbs.db")
    (True, True, False)
    """
    _, dot, ending = name.rpartition(".")
    return not dot or f".{ending.lower()}" in FORMAT_OF
