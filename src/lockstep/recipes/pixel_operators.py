"""Operators on pixels that RandAugment and its relatives choose from: the same bits as Pillow's.

An operator takes an image, uint8 RGB [height, width, 3], one number, and for changes of geometry a
`Resampling`. It returns the changed image. Where a table of 256 values does what Pillow
does, OpenCV looks it up, which needs no conversion and leaves Python's other threads free.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from PIL import Image

Interpolation = Literal["nearest", "bilinear", "bicubic"]
_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
_LEVELS = np.arange(256)
_GREY = np.array([19595, 38470, 7471], np.float32)
"""Weights of red, green and blue in Pillow's greyscale, times 65,536: those of ITU-R 601-2. Their
products and sums are whole numbers below 2^24, so float32 holds them exactly."""

_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
"""The kernel of Pillow's `ImageFilter.SMOOTH`."""


@dataclass(frozen=True)
class Resampling:
    """How a change of geometry gets its pixels."""

    interpolation: Interpolation
    fill: tuple[int, int, int]
    """Red, green and blue of pixels from outside the image."""


Operator = Callable[[np.ndarray, float, Resampling], np.ndarray]


def _look_up(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return an image whose values are replaced as a table says: [256], or [256, 3] for colours."""
    values = np.clip(table, 0, 255).astype(np.uint8)
    return cv2.LUT(pixels, values.reshape(1, 256, -1))


# Colours


def make_grey(pixels: np.ndarray) -> np.ndarray:
    """Return Pillow's greyscale of an image: uint8 [height, width]."""
    weighted: np.ndarray = cv2.transform(pixels.astype(np.float32), _GREY[None])
    return ((weighted + np.float32(2**15)) * np.float32(2**-16)).astype(np.uint8)


def _blend_levels(level: int, factor: float) -> np.ndarray:
    """Return what Pillow's `blend` of a level and each level gives, before it cuts off fractions:
    float32 [256]."""
    own = np.float32(level)
    blended: np.ndarray = own + np.float32(factor) * (_LEVELS.astype(np.float32) - own)
    return blended


def change_brightness(pixels: np.ndarray, factor: float, _: Resampling) -> np.ndarray:
    """Blend with black (`ImageEnhance.Brightness`). A factor of 1 changes nothing."""
    return _look_up(pixels, _blend_levels(0, factor))


def change_contrast(pixels: np.ndarray, factor: float, _: Resampling) -> np.ndarray:
    """Blend with the mean of the greyscale (`ImageEnhance.Contrast`). 1 changes nothing."""
    grey = make_grey(pixels)
    mean = int(int(grey.sum()) / grey.size + 0.5)
    return _look_up(pixels, _blend_levels(mean, factor))


def change_colour(pixels: np.ndarray, factor: float, _: Resampling) -> np.ndarray:
    """Blend with the greyscale (`ImageEnhance.Color`). 1 changes nothing."""
    grey = cv2.cvtColor(make_grey(pixels), cv2.COLOR_GRAY2RGB)
    return _blend_images(grey, pixels, factor)


def change_sharpness(pixels: np.ndarray, factor: float, _: Resampling) -> np.ndarray:
    """Blend with the smoothed image (`ImageEnhance.Sharpness`). 1 changes nothing."""
    return _blend_images(_smooth(pixels), pixels, factor)


def _smooth(pixels: np.ndarray) -> np.ndarray:
    """Return Pillow's `ImageFilter.SMOOTH` of an image, which leaves the border as it is.

    It is a whole number over 13, rounded, and never halfway between two levels: any order of
    summing in float32 gives the same level.
    """
    smooth = cv2.filter2D(pixels, -1, _SMOOTH)
    smooth[[0, -1]] = pixels[[0, -1]]
    smooth[:, [0, -1]] = pixels[:, [0, -1]]
    return smooth


def _blend_images(degenerate: np.ndarray, pixels: np.ndarray, factor: float) -> np.ndarray:
    """Return Pillow's `blend` of two images."""
    blended: np.ndarray = cv2.subtract(pixels, degenerate, dtype=cv2.CV_32F)
    blended *= np.float32(factor)
    blended += degenerate
    if not 0 <= factor <= 1:
        np.clip(blended, 0, 255, out=blended)
    return blended.astype(np.uint8)


def posterise(pixels: np.ndarray, bits: float, _: Resampling) -> np.ndarray:
    """Keep the upper bits of each value (`ImageOps.posterize`). 0 bits leave a black image."""
    return pixels & np.uint8(256 - 2 ** (8 - int(bits)))


def solarise(pixels: np.ndarray, threshold: float, _: Resampling) -> np.ndarray:
    """Invert the values at or above a threshold (`ImageOps.solarize`)."""
    return _look_up(pixels, np.where(threshold > _LEVELS, _LEVELS, 255 - _LEVELS))


def solarise_add(pixels: np.ndarray, added: float, _: Resampling) -> np.ndarray:
    """Add to the values below 128 (RandAugment's `SolarizeAdd`)."""
    return _look_up(pixels, _LEVELS + np.where(_LEVELS < 128, int(added), 0))


def invert(pixels: np.ndarray, _number: float, _: Resampling) -> np.ndarray:
    """Invert all values (`ImageOps.invert`)."""
    return cv2.bitwise_not(pixels)


def _count_levels(pixels: np.ndarray) -> list[np.ndarray]:
    """Return how many pixels have each level, for each colour: int64 [256]."""
    return [
        cv2.calcHist([pixels], [colour], None, [256], [0, 256]).ravel().astype(np.int64)
        for colour in range(3)
    ]


def stretch_contrast(pixels: np.ndarray, _number: float, _: Resampling) -> np.ndarray:
    """Stretch the levels of each colour to 0 to 255 (`ImageOps.autocontrast`)."""
    tables = []
    for counts in _count_levels(pixels):
        levels = np.flatnonzero(counts)
        low = int(levels[0])
        high = int(levels[-1])
        if high == low:
            tables.append(_LEVELS)
        else:
            scale = 255.0 / (high - low)
            tables.append((_LEVELS * scale + -low * scale).astype(np.int64))
    return _look_up(pixels, np.stack(tables, axis=1))


def equalise(pixels: np.ndarray, _number: float, _: Resampling) -> np.ndarray:
    """Equalise how often the levels of each colour come (`ImageOps.equalize`)."""
    tables = []
    for counts in _count_levels(pixels):
        levels = np.flatnonzero(counts)
        step = int(counts.sum() - counts[levels[-1]]) // 255
        if step == 0:
            tables.append(_LEVELS)
        else:
            below = np.cumsum(counts) - counts
            tables.append((step // 2 + below) // step)
    return _look_up(pixels, np.stack(tables, axis=1))


def keep(pixels: np.ndarray, _number: float, _: Resampling) -> np.ndarray:
    """Change nothing."""
    return pixels


# Geometry


def _map_affine(
    pixels: np.ndarray, matrix: tuple[float, float, float, float, float, float], how: Resampling
) -> np.ndarray:
    """Return an image whose pixel (x, y) is that at (a x + b y + c, d x + e y + f)."""
    image = Image.fromarray(pixels)
    changed = image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        _FILTERS[how.interpolation],
        fillcolor=how.fill,
    )
    return np.asarray(changed)


def shear_x(pixels: np.ndarray, factor: float, how: Resampling) -> np.ndarray:
    """Shear along x: a row at y comes from `factor` y further right."""
    return _map_affine(pixels, (1, factor, 0, 0, 1, 0), how)


def shear_y(pixels: np.ndarray, factor: float, how: Resampling) -> np.ndarray:
    """Shear along y: a column at x comes from `factor` x further down."""
    return _map_affine(pixels, (1, 0, 0, factor, 1, 0), how)


def translate_x(pixels: np.ndarray, share: float, how: Resampling) -> np.ndarray:
    """Move to the left by a share of the width."""
    offset = share * pixels.shape[1]
    moved = None
    if how.interpolation != "nearest":
        moved = translate(pixels, offset, 1, how.interpolation, how.fill)
    return _map_affine(pixels, (1, 0, offset, 0, 1, 0), how) if moved is None else moved


def translate_y(pixels: np.ndarray, share: float, how: Resampling) -> np.ndarray:
    """Move up by a share of the height."""
    offset = share * pixels.shape[0]
    moved = None
    if how.interpolation != "nearest":
        moved = translate(pixels, offset, 0, how.interpolation, how.fill)
    return _map_affine(pixels, (1, 0, 0, 0, 1, offset), how) if moved is None else moved


def _move_rows(pixels: np.ndarray, offset: int, fill: tuple[int, int, int]) -> np.ndarray:
    """Return an image whose rows, or columns if it is transposed, are moved by whole pixels."""
    moved = np.empty_like(pixels)
    if offset >= 0:
        moved[:offset] = fill
        moved[offset:] = pixels[: max(len(pixels) - offset, 0)]
    else:
        moved[offset:] = fill
        moved[:offset] = pixels[-offset:]
    return moved


def move_x(pixels: np.ndarray, offset: float, how: Resampling) -> np.ndarray:
    """Move to the right by whole pixels."""
    moved = _move_rows(pixels.swapaxes(0, 1), int(offset), how.fill)
    return np.ascontiguousarray(moved.swapaxes(0, 1))


def move_y(pixels: np.ndarray, offset: float, how: Resampling) -> np.ndarray:
    """Move down by whole pixels."""
    return _move_rows(pixels, int(offset), how.fill)


def move_x_by_share(pixels: np.ndarray, share: float, how: Resampling) -> np.ndarray:
    """Move to the right by a share of the width, cut off to whole pixels in float32."""
    return move_x(pixels, float(np.float32(share * pixels.shape[1])), how)


def move_y_by_share(pixels: np.ndarray, share: float, how: Resampling) -> np.ndarray:
    """Move down by a share of the height, cut off to whole pixels in float32."""
    return move_y(pixels, float(np.float32(share * pixels.shape[0])), how)


def rotate(pixels: np.ndarray, degrees: float, how: Resampling) -> np.ndarray:
    """Rotate counterclockwise around the centre (`Image.rotate`)."""
    filtering = _FILTERS[how.interpolation]
    return np.asarray(Image.fromarray(pixels).rotate(degrees, filtering, fillcolor=how.fill))


OPERATORS: dict[str, Operator] = {
    "identity": keep,
    "autocontrast": stretch_contrast,
    "brightness": change_brightness,
    "colour": change_colour,
    "contrast": change_contrast,
    "equalise": equalise,
    "invert": invert,
    "posterise": posterise,
    "sharpness": change_sharpness,
    "solarise": solarise,
    "solarise_add": solarise_add,
    "move_x": move_x,
    "move_y": move_y,
    "move_x_by_share": move_x_by_share,
    "move_y_by_share": move_y_by_share,
    "rotate": rotate,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
}


_MARGIN = 2
"""Pixels next to the first and the last one that the cubic weighs."""


def translate(
    pixels: np.ndarray,
    offset: float,
    axis: Literal[0, 1],
    interpolation: Literal["bilinear", "bicubic"],
    fill: tuple[int, int, int],
) -> np.ndarray | None:
    """Return an image whose row or column i (`axis` 0 or 1) is that at i + `offset`.

    Pixels from outside have the colour `fill`. Returns None in the rare case that rounding puts
    neighbours at different distances.
    """
    size = pixels.shape[axis]
    places = np.arange(size) + 0.5 + offset
    moved = np.empty_like(pixels)
    moved[:] = fill
    inside = np.flatnonzero((places >= 0) & (places < size))
    if len(inside) == 0:
        return moved
    begin = int(inside[0])
    end = int(inside[-1]) + 1
    places = places[begin:end] - 0.5
    first = np.floor(places)
    steps = first - np.arange(begin, end)
    if (steps != steps[0]).any():
        return None
    values = _weigh(pixels, begin + int(steps[0]), places - first, axis, interpolation)
    if axis == 0:
        moved[begin:end] = values.reshape(end - begin, *pixels.shape[1:])
    else:
        moved[:, begin:end] = values.reshape(len(pixels), end - begin, 3)
    return moved


def _weigh(
    pixels: np.ndarray, start: int, shares: np.ndarray, axis: Literal[0, 1], interpolation: str
) -> np.ndarray:
    """Return rows or columns between those from `start` on and their next ones: uint8, with the
    colours of a row one after the other.

    `shares` are how far each is on the way to the next one. Beyond the border, the border is
    repeated.
    """
    rows = _MARGIN if axis == 0 else 0
    columns = _MARGIN - rows
    padded = cv2.copyMakeBorder(pixels, rows, rows, columns, columns, cv2.BORDER_REPLICATE)
    flat = padded.reshape(len(padded), -1).astype(np.int16)
    count = len(shares)

    def neighbours(distance: int) -> np.ndarray:
        at = start + distance + _MARGIN
        return flat[at : at + count] if axis == 0 else flat[:, 3 * at : 3 * (at + count)]

    share = shares[:, None] if axis == 0 else np.repeat(shares, 3)
    own = neighbours(0)
    after = neighbours(1)
    if interpolation == "bilinear":
        return (own + (after - own) * share).astype(np.uint8)
    before = neighbours(-1)
    second = neighbours(2)
    # The cubic of Pillow's transforms has a = -1, not the -0.5 of its resizes.
    cubic = (own - before + second - after) * share
    cubic += 2 * (before - own) + after - second
    cubic *= share
    cubic += after - before
    cubic *= share
    cubic += own
    return np.clip(cubic, 0, 255, out=cubic).astype(np.uint8)
