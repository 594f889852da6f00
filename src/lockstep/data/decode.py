"""Encoded bytes -> pixels: libjpeg-turbo for JPEG, Pillow for everything else.

EXIF orientation is not applied, as in NVIDIA's systems: a rotated photo stays as it is stored.
"""

import io

import cv2
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

# One image is one thread's work; OpenCV's own pool would only get in the way of the loader's threads.
cv2.setNumThreads(1)

# libjpeg's complaint about bytes between segments; the picture is whole (a few of ImageNet's files have them).
_HARMLESS = "extraneous bytes"


def decode(data: bytes) -> np.ndarray:
    """Return an image as uint8 RGB [height, width, 3]. Grey and CMYK are converted.

    Raises `ValueError` with the reason if the bytes are no image.
    """
    if data[:2] == b"\xff\xd8":
        colours = simplejpeg.decode_jpeg_header(data, strict=False)[2]
        if colours in ("RGB", "YCbCr", "Gray"):
            return np.asarray(simplejpeg.decode_jpeg(data, strict=False))
    return np.asarray(_pillow(data).convert("RGB"))


def check(data: bytes) -> tuple[int, int]:
    """Return height and width of an image after decoding all of it.

    Raises `ValueError` with the reason if it is empty, cut short, damaged or no image.
    """
    if not data:
        raise ValueError("empty file")
    if data[:2] != b"\xff\xd8":
        image = _pillow(data)
        return image.height, image.width
    height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    if colours not in ("RGB", "YCbCr", "Gray"):
        _pillow(data)
        return height, width
    try:
        # An eighth of the size: all of the file is read and entropy-decoded, at two thirds of the cost.
        simplejpeg.decode_jpeg(data, min_height=1, min_width=1)
    except ValueError as error:
        if _HARMLESS not in str(error):
            raise
    return height, width


def _pillow(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except UnidentifiedImageError:
        raise ValueError("not an image") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's words for damaged files
        raise ValueError(str(error)) from None
    return image


def transform(
    image: np.ndarray,
    window: tuple[int, int, int, int],
    resized: tuple[int, int],
    offset: tuple[int, int],
    *,
    flip: bool,
    antialias: bool,
    out: np.ndarray,
) -> None:
    """Cut `window` (top, left, height, width) out of an image, resize it, and write the square at `offset` to `out`.

    `image` is uint8 [height, width, 3], `out` uint8 [size, size, 3]. Bilinear; see `Recipe.antialias`.
    """
    top, left, height, width = window
    size = out.shape[0]
    part = image[top : top + height, left : left + width]
    if antialias:
        pixels = np.asarray(Image.fromarray(part).resize((resized[1], resized[0]), Image.Resampling.BILINEAR))
    else:
        pixels = cv2.resize(part, (resized[1], resized[0]), interpolation=cv2.INTER_LINEAR)
    pixels = pixels[offset[0] : offset[0] + size, offset[1] : offset[1] + size]
    out[:] = pixels[:, ::-1] if flip else pixels
