"""Crop, resize and flip an image while it is decoded, and augment it. `lockstep.recipes.order`
draws the windows, the flips and what the augmentations do.

Windows of JPEGs are decoded by our own decoder, which skips what lies outside; everything else is
decoded whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from PIL import Image

from lockstep.data.decoding import jpeg
from lockstep.data.decoding.decode import check, decode, is_plain_jpeg
from lockstep.data.decoding.file_parts import JPEG_START
from lockstep.data.decoding.jpeg import Window
from lockstep.data.decoding.orientation import (
    FLIPS,
    UPRIGHT,
    find_stored_window,
    shown_size,
    turn_image,
)
from lockstep.data.decoding.size_limits import check_ratio, decoding
from lockstep.recipes import Recipe
from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.order import BatchPlan, centre_plan
from lockstep.system.errors import RecipeError

_FILTERS = {
    "bilinear": (Image.Resampling.BILINEAR, cv2.INTER_LINEAR),
    "bicubic": (Image.Resampling.BICUBIC, cv2.INTER_CUBIC),
}
"""The filters of Pillow and OpenCV by the values of `Recipe.interpolation`."""

# Each image is decoded by one thread; OpenCV's own pool would only slow down the loader's threads.
cv2.setNumThreads(1)


@dataclass(frozen=True)
class Square:
    """Which square of an image is shown, and how it is resized."""

    window: Window
    resized: tuple[int, int]
    """Height and width of the window after it is resized."""
    offset: tuple[int, int]
    """The square's corner in the resized window. What it shows outside is reflected at the border.
    """
    flip: bool
    """Whether it is mirrored left to right."""
    vertical_flip: bool = False
    antialias: bool = False
    """This and the next two are fields of `Recipe`."""
    interpolation: str = "bilinear"
    dct_scaling: bool = False
    """It does not apply to images that are decoded."""
    sampling: str = "half_pixel"
    """As `Recipe.eval_sampling`."""
    orientation: int = UPRIGHT
    """The EXIF orientation. The window is one of the turned image."""


def resampling(recipe: Recipe, *, evaluation: bool) -> dict[str, Any]:
    """Return how a recipe resizes images in training or in evaluation, as fields of `Square`.

    The interpolation "random" is one of each image's plan.
    """
    interpolation: str = recipe.interpolation
    if not evaluation and recipe.training_interpolation != "same":
        interpolation = recipe.training_interpolation
    return {
        "antialias": recipe.eval_antialias if evaluation else recipe.antialias,
        "interpolation": interpolation,
        "dct_scaling": recipe.dct_scaling,
        "sampling": recipe.eval_sampling if evaluation else "half_pixel",
    }


def cutting(plan: BatchPlan, i: int) -> dict[str, Any]:
    """Return how a plan cuts, flips and resizes its image `i`, as fields of `Square`."""
    how: dict[str, Any] = {
        "window": tuple(plan.windows[i].tolist()),
        "resized": tuple(plan.resized[i].tolist()),
        "offset": tuple(plan.offsets[i].tolist()),
        "flip": bool(plan.flips[i]),
    }
    if plan.vertical_flips is not None:
        how["vertical_flip"] = bool(plan.vertical_flips[i])
    if plan.is_bicubic is not None:
        how["interpolation"] = "bicubic" if plan.is_bicubic[i] else "bilinear"
    return how


def prepare_square(
    data: bytes | np.ndarray, orientation: int, recipe: Recipe, out: np.ndarray
) -> None:
    """Write an image, encoded or uint8 [height, width, 3], to `out`, uint8 [eval_crop, eval_crop,
    3], as the recipe's evaluation has it.

    Raises `ValueError` if it is damaged or not an image; `TooManyPixels`, which is one, if it is
    too large.
    """
    stored = check(data) if isinstance(data, bytes) else (data.shape[0], data.shape[1])
    size = shown_size(stored, orientation)
    plan = centre_plan(recipe, np.zeros(1, np.int64), np.array([size]))
    how = {**cutting(plan, 0), **resampling(recipe, evaluation=True)}
    decode_into(data, stored, Square(**how, orientation=orientation), out)


def decode_into(
    data: bytes | np.ndarray, size: tuple[int, int], square: Square, out: np.ndarray
) -> None:
    """Decode a window of an image, resize it, and write the square to `out`.

    `data` is an encoded image, or one that is decoded: uint8 [height, width, 3]. `size` is height
    and width of the stored image; `out` is uint8 [size, size, 3]. Raises `ValueError` if the bytes
    are not an image, or if it has another size or is a long strip.
    """
    check_ratio(*square.resized, square.window[2:])
    reduction = 1
    if square.dct_scaling and isinstance(data, bytes) and is_plain_jpeg(data):
        reduction = _reduction(square.window, square.resized)
    resize = _resize_window if square.sampling == "half_pixel" else _sample_window
    pixels = resize(data, size, square, reduction, out)
    if square.flip or square.vertical_flip:
        # many times faster than a reversed copy by NumPy
        cv2.flip(pixels, FLIPS[square.flip, square.vertical_flip], dst=out)
    elif pixels is not out:
        out[:] = pixels


def _sample_window(
    data: bytes | np.ndarray, size: tuple[int, int], square: Square, reduction: int, out: np.ndarray
) -> np.ndarray:
    """Return a square of a window that is not resized from half pixels."""
    window = square.window
    _, _, *source = _reduce_window(window, reduction)
    from lockstep.data.decoding.sampling import (  # other geometries than PyTorch's are rare
        crop_to_needed,
        filter_square,
        sample_square,
        stretches,
    )

    where = stretches(source, square.resized, square.offset, len(out), square.sampling)
    if not square.antialias and reduction == 1:
        window, where = crop_to_needed(window, where, len(out))
    part = _decode_window(data, size, window, reduction, square.orientation)
    if square.antialias:
        return filter_square(part, where, len(out), _FILTERS[square.interpolation][0])
    return sample_square(part, where, len(out), square.interpolation)


def _resize_window(
    data: bytes | np.ndarray, size: tuple[int, int], square: Square, reduction: int, out: np.ndarray
) -> np.ndarray:
    """Return a square of a window that is resized from half pixels; `out` itself if nothing is
    cropped or flipped, and OpenCV writes directly to it."""
    part = _decode_window(data, size, square.window, reduction, square.orientation)
    height, width = square.resized
    filtering, interpolating = _FILTERS[square.interpolation]
    if square.antialias:
        pixels = np.asarray(Image.fromarray(part).resize((width, height), filtering))
    else:
        is_whole = square.resized == out.shape[:2] and square.offset == (0, 0)
        direct = out if is_whole and not (square.flip or square.vertical_flip) else None
        pixels = cv2.resize(part, (width, height), dst=direct, interpolation=interpolating)
        if pixels is direct:
            return out
    return _cut_square(pixels, square.offset, len(out))


def _cut_square(pixels: np.ndarray, offset: tuple[int, int], size: int) -> np.ndarray:
    """Return a square of an image, which may reach beyond it: uint8 [size, size, 3]."""
    top, left = offset
    above = max(-top, 0)
    beside = max(-left, 0)
    below = max(top + size - pixels.shape[0], 0)
    behind = max(left + size - pixels.shape[1], 0)
    if above or beside or below or behind:
        margins = (above, below, beside, behind)
        pixels = cv2.copyMakeBorder(pixels, *margins, cv2.BORDER_REFLECT_101)
    return pixels[top + above : top + above + size, left + beside : left + beside + size]


def _decode_window(
    data: bytes | np.ndarray,
    size: tuple[int, int],
    window: Window,
    reduction: int,
    orientation: int,
) -> np.ndarray:
    """Return a window of a turned image, decoded at a fraction of its size: uint8 [height, width,
    3].

    Only the window is decoded if that gives the same pixels. Raises `ValueError`.
    """
    stored_size = (-(-size[0] // reduction), -(-size[1] // reduction))
    # The window of the turned image is reduced first: both have their pixels counted from the upper
    # left corner.
    window = find_stored_window(_reduce_window(window, reduction), stored_size, orientation)
    if isinstance(data, bytes) and reduction == 1 and data.startswith(JPEG_START):
        with decoding(window[2] * window[3]):
            part = jpeg.decode_window(data, size, window)
        if part is not None:
            return turn_image(part, orientation)
    image = decode(data, reduction) if isinstance(data, bytes) else data
    if image.shape[:2] != stored_size:
        raise ValueError(f"it has {image.shape[1]} x {image.shape[0]} pixels")
    top, left, height, width = window
    return turn_image(image[top : top + height, left : left + width], orientation)


def _reduce_window(window: Window, reduction: int) -> Window:
    top, left, height, width = window
    return top // reduction, left // reduction, height // reduction, width // reduction


def _reduction(window: Window, resized: tuple[int, int]) -> int:
    """Return the largest of libjpeg's reductions that leaves the window at least as large as the
    resized one."""
    for reduction in (8, 4, 2):
        if window[2] >= reduction * resized[0] and window[3] >= reduction * resized[1]:
            return reduction
    return 1


def augment(
    augmentations: Sequence[Augmentation], parameters: Iterable[Any], out: np.ndarray
) -> None:
    """Apply augmentations to an image, uint8 [size, size, 3], one after the other. `parameters` is
    what each does to it.

    Raises `RecipeError` if one returns anything but such an image, or if one of the user's own
    fails.
    """
    from lockstep.recipes.plug_ins import naming

    pixels = out
    for augmentation, what in zip(augmentations, parameters, strict=True):
        with naming(augmentation, "apply"):
            pixels = augmentation.apply(pixels, what)
        kind = getattr(pixels, "shape", None), getattr(pixels, "dtype", type(pixels).__name__)
        if kind != (out.shape, out.dtype):
            raise RecipeError(
                f"the augmentation {augmentation.name} returned {kind[1]} {kind[0]}; expected"
                f" uint8 {out.shape}"
            )
        if not pixels.flags.writeable:
            pixels = pixels.copy()  # of a Pillow image; the next augmentation may change it
    if pixels is not out:
        out[:] = pixels
