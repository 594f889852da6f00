"""Augmentations with DALI's operators, where their pixels are those of the host loader.

An image's random numbers are drawn in its plan, as for the host loader. DALI gets what follows from
them as inputs next to the image. Its pixels are within one level of the host loader's
(docs/reference/augmentations.md); other augmentations are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.augmentations.colour_jitter import Changes, ColourJitter
from lockstep.recipes.augmentations.gaussian_blur import TAPS, GaussianBlur
from lockstep.recipes.augmentations.greyscale import Greyscale
from lockstep.recipes.augmentations.random_erasing import RandomErasing, Rectangle
from lockstep.recipes.augmentations.solarise import Solarise
from lockstep.system.errors import RecipeError

_OPERATIONS = "DALI's equalise and rotation differ by up to 7 and 255 levels"
_BOXES = "DALI's blur differs from Pillow's box filters by up to 43 levels"
_REASONS = {
    "augmix": _OPERATIONS,
    "autoaugment": _OPERATIONS,
    "randaugment": _OPERATIONS,
    "trivialaugment_wide": _OPERATIONS,
    "three_augment": _BOXES,
}
"""Why DALI changes pixels differently in some augmentations, with the largest difference
measured."""


class _Operator(NamedTuple):
    """How DALI does an augmentation."""

    count_inputs: Callable[[Any], int]
    """Return how many inputs each image has for an augmentation."""
    encode: Callable[[Any, Any, int], tuple[np.ndarray, ...]]
    """Return these inputs: of an augmentation, what it does to an image, and the image's size. If
    the image stays as it is, they are those of a change that changes nothing."""
    apply: Callable[..., Any]
    """Return the changed images in DALI's graph: of an augmentation, images, and their inputs."""


def _encode_solarise(solarise: Solarise, applies: bool, _size: int) -> tuple[np.ndarray, ...]:
    """Return the smallest value that is inverted."""
    return (np.array(solarise.threshold if applies else 256, np.int32),)


def _solarise(_: Solarise, images: Any, threshold: Any) -> Any:
    from nvidia.dali import fn, types

    inverted = fn.cast(images >= threshold, dtype=types.DALIDataType.UINT8)
    return images ^ (inverted * np.uint8(255))  # 255 - value


_KEPT = ("brightness", 1.0)


def _encode_greyscale(_: Greyscale, applies: bool, _size: int) -> tuple[np.ndarray, ...]:
    """Return the inputs of a blend."""
    return _encode_blend(*("saturation", 0.0) if applies else _KEPT)


def _count_changes(jitter: ColourJitter) -> int:
    return sum(map(bool, (jitter.brightness, jitter.contrast, jitter.saturation)))


def _encode_jitter(jitter: ColourJitter, changes: Changes, _size: int) -> tuple[np.ndarray, ...]:
    """Return the inputs of a blend for each change."""
    inputs: list[np.ndarray] = []
    for change in changes or [_KEPT] * _count_changes(jitter):
        inputs += _encode_blend(*change)
    return tuple(inputs)


def _encode_blend(change: str, factor: float) -> tuple[np.ndarray, ...]:
    """Return the factor of a change, and the shares of the mean grey and of the greys in what is
    blended with the image."""
    numbers = (factor, change == "contrast", change == "saturation")
    return tuple(np.array(number, np.float32) for number in numbers)


def _blend(_: Augmentation, images: Any, *inputs: Any) -> Any:
    """Blend images with black, their mean grey or their greys, by three inputs for each blend.

    The arithmetic is that of `lockstep.recipes.pixel_operators`, and so are the bits.
    """
    from nvidia.dali import fn, math, types

    for first in range(0, len(inputs), 3):
        factor, share_of_mean, share_of_greys = inputs[first : first + 3]
        red, green, blue = (
            fn.cast(images[:, :, i : i + 1], dtype=types.DALIDataType.INT32) for i in range(3)
        )
        greys = (red * 19595 + green * 38470 + blue * 7471 + 2**15) // 2**16
        total = fn.reductions.sum(greys, dtype=types.DALIDataType.INT64)
        pixels = images.shape()[0] * images.shape()[1]
        mean = (2 * total + pixels) // (2 * pixels)  # rounded
        base = share_of_mean * mean + share_of_greys * greys
        blended = base + factor * (fn.cast(images, dtype=types.DALIDataType.FLOAT) - base)
        # values beyond 0 and 255 become 0 and 255
        images = fn.cast(math.floor(blended), dtype=types.DALIDataType.UINT8)
    return images


def _encode_erasing(
    _: RandomErasing, rectangles: list[Rectangle], size: int
) -> tuple[np.ndarray, ...]:
    """Return corners and sides of the rectangles: float32 [2 * rectangles] each."""
    places = [rectangle.find_place(size) for rectangle in rectangles] or [(0, 0, 0, 0)]
    table = np.array(places, np.float32)  # what DALI takes
    return table[:, :2].ravel(), table[:, 2:].ravel()


def _erase(erasing: RandomErasing, images: Any, corners: Any, sides: Any) -> Any:
    from nvidia.dali import fn

    fill = erasing.mean_levels.tolist()
    return fn.erase(images, anchor=corners, shape=sides, axis_names="HW", fill_value=fill)


_NO_BLUR = 0.01
"""A standard deviation at which a pixel has all of the weight in float32. DALI takes no 0."""


def _encode_blur(_: GaussianBlur, sigma: float | None, _size: int) -> tuple[np.ndarray, ...]:
    """Return the standard deviation."""
    return (np.array(max(sigma or 0.0, _NO_BLUR), np.float32),)


def _blur(_: GaussianBlur, images: Any, sigma: Any) -> Any:
    from nvidia.dali import fn

    return fn.gaussian_blur(images, sigma=sigma, window_size=TAPS)


_OPERATORS = {
    "colour_jitter": _Operator(lambda jitter: 3 * _count_changes(jitter), _encode_jitter, _blend),
    "gaussian_blur": _Operator(lambda _: 1, _encode_blur, _blur),
    "greyscale": _Operator(lambda _: 3, _encode_greyscale, _blend),
    "random_erasing": _Operator(lambda _: 2, _encode_erasing, _erase),
    "solarise": _Operator(lambda _: 1, _encode_solarise, _solarise),
}
"""The augmentations that DALI does, by name."""


def refuse_other_pixels(augmentations: Sequence[Augmentation]) -> None:
    """Raise `RecipeError` that names the augmentations whose pixels DALI cannot give."""
    reasons = {}
    for augmentation in augmentations:
        reason = _find_reason(augmentation)
        if reason:
            reasons[augmentation.name] = reason
    if reasons:
        names = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise RecipeError(
            f"DALI has no operators that give the pixels of these augmentations: {names}. Use the"
            " host loader (--loader host), or leave them out (--set augmentations=[])"
        )


def _find_reason(augmentation: Augmentation) -> str:
    """Return why DALI cannot give an augmentation's pixels; "" if it can."""
    if isinstance(augmentation, ColourJitter) and augmentation.hue:
        return "DALI's hue differs by up to 156 levels; DALI supports hue: 0"
    if isinstance(augmentation, GaussianBlur) and augmentation.dialect == "pillow":
        return f"{_BOXES}; DALI supports dialect: torchvision"
    if isinstance(augmentation, RandomErasing) and augmentation.fill != "mean":
        return "DALI fills rectangles with one colour; it supports fill: mean"
    if augmentation.name in _OPERATORS:
        return ""
    return _REASONS.get(augmentation.name, "it is Python code")


def count_inputs(augmentations: Sequence[Augmentation]) -> int:
    """Return how many inputs of DALI's graph the augmentations of an image have."""
    return sum(_OPERATORS[one.name].count_inputs(one) for one in augmentations)


def encode_parameters(
    augmentations: Sequence[Augmentation], parameters: Sequence[Any], size: int
) -> list[np.ndarray]:
    """Return these inputs for an image of this size. `parameters` are what the augmentations do to
    it, one for each."""
    inputs: list[np.ndarray] = []
    for augmentation, what in zip(augmentations, parameters, strict=True):
        inputs += _OPERATORS[augmentation.name].encode(augmentation, what, size)
    return inputs


def augment_images(
    augmentations: Sequence[Augmentation], images: Any, inputs: Sequence[Any]
) -> Any:
    """Return the augmented images in DALI's graph. `inputs` are the nodes of what
    `encode_parameters` returns."""
    first = 0
    for augmentation in augmentations:
        operator = _OPERATORS[augmentation.name]
        end = first + operator.count_inputs(augmentation)
        images = operator.apply(augmentation, images, *inputs[first:end])
        first = end
    return images
