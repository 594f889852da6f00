"""The formats of images that are decoded, and how their files are recognised."""

import re
from functools import cache

from PIL import features

INSTALL = "pip install pillow-heif==1.8.1"
FORMAT_OF = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".ppm": "PPM",
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".webp": "WEBP",
    **dict.fromkeys((".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".pgm", ".pbm", ".pnm"), "PPM"),
    ".avif": "AVIF",
    **dict.fromkeys((".heic", ".heif"), "HEIF"),
}
"""Pillow's name of the format, by the ending of an image's name. Of several images of a sample in a
tar, that with the first of these endings counts."""
MISSING = {
    "AVIF": "AVIF is read by Pillow 11.3 and newer: pip install pillow==13.0.0",
    "HEIF": f"HEIC is read by a plug-in of Pillow: {INSTALL}",
}
"""Why a format may not be read here, and what to do."""
BOX = b"ftyp"
"""Bytes 4 to 8 of HEIC and AVIF."""
_BRANDS = {"AVIF": (b"avif", b"avis"), "HEIF": (b"heic", b"heix", b"heim", b"heis", b"mif1")}
"""Bytes 8 to 12 of HEIC and AVIF."""
_POINTER = b"version https://git-lfs"
BEGINS_AS_IMAGE = re.compile(
    rb"\xff\xd8|\x89PNG|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II[*+]\0|MM\0[*+]"
    rb"|P[1-6]\s+(?:#[^\n]*\n\s*)*\d|....ftyp(?:avi[fs]|hei[cxms]|mif1)",
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


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the formats that are decoded here, by Pillow's names. Pillow supports dozens, and
    starts another program for some of them (EPS)."""
    missing = set()
    if not features.check("avif"):
        missing.add("AVIF")
    try:
        import pillow_heif

        pillow_heif.register_heif_opener()
    except ImportError:
        missing.add("HEIF")
    return tuple(sorted(set(FORMAT_OF.values()) - missing))


def explain_pointer(begin: bytes | memoryview) -> str:
    """Return what to do if a file begins like a pointer of Git LFS, a short text that stands for
    it; "" if it does not."""
    if bytes(begin[: len(_POINTER)]) == _POINTER:
        return "a Git LFS pointer, not the file; fetch all files in its repository: git lfs pull"
    return ""


def explain_unreadable(data: bytes | memoryview) -> str:
    """Return why the first bytes of an image are of no format that is decoded here."""
    if data[4:8] == BOX:
        for name, brands in _BRANDS.items():
            if bytes(data[8:12]) in brands and name not in readable_formats():
                return MISSING[name]
    return explain_pointer(data) or "not an image in a known format"
