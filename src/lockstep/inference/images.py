"""Images to predict, of any kind: paths, encoded bytes, arrays, tensors and Pillow images. Each
becomes what a model sees."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps

from lockstep.data.decoding.augment import prepare_square
from lockstep.data.decoding.decode import convert_to_rgb, decode_undamaged
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation, turn_image
from lockstep.data.decoding.size_limits import check_ratio
from lockstep.recipes import Recipe
from lockstep.system.errors import DataError
from lockstep.system.regular_files import IMAGE, read_regular


class Tensor(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Sequence[int]:
        """The lengths of its axes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded image with a name, such as one in a tar file. It is read only when needed."""

    path: Path
    read: Callable[[], bytes]
    """Returns the bytes. Raises `OSError`, or `ValueError` with the reason."""


_File = str | os.PathLike[str] | bytes | bytearray | memoryview | Encoded
Image = _File | np.ndarray | Tensor | PIL.Image.Image
_KINDS = (str, os.PathLike, bytes, bytearray, memoryview, PIL.Image.Image, Encoded)
ACCEPTED = (
    "a path, the bytes of an image file, an array or tensor [height, width, 3] or [3, height,"
    " width] of RGB in uint8 or in floats from 0 to 1, a Pillow image, or several of these"
)


def list_images(images: Image | Iterable[Image]) -> Iterator[Image]:
    """Return one image or all of several, arrays and tensors as uint8 [height, width, 3].

    Raises `DataError` at once if `images` or a part of a list is not an image; other iterables
    raise it when they reach it.
    """
    if _is_array(images) or isinstance(images, _KINDS):
        return iter(_read_images(images))
    is_module = hasattr(images, "state_dict")  # some are iterable
    if is_module or isinstance(images, Mapping) or not isinstance(images, Iterable):
        raise _wrong(images)
    if isinstance(images, list | tuple):
        for image in images:
            _check_kind(image)
    return chain.from_iterable(map(_read_images, images))


def is_one_image(images: Any) -> bool:
    """Return whether this is one image, and not several."""
    if _is_array(images):
        return len(images.shape) == 3
    return isinstance(images, _KINDS)


def _read_images(value: Any) -> Iterable[Image]:
    """Return the image that a value is, or those of an array of several."""
    if _is_array(value):
        try:
            array = _read_array(value)
        except ValueError as error:
            raise _wrong(value, str(error)) from None
        return array if array.ndim == 4 else [array]
    _check_kind(value)
    return [value]


def _check_kind(value: Any) -> None:
    """Raise `DataError` if a value is not an image or several, by its type and shape."""
    shape = tuple(getattr(value, "shape", ()))
    has_colours = len(shape) in (3, 4) and 3 in (shape[-1], shape[-3])
    if not (has_colours if _is_array(value) else isinstance(value, _KINDS)):
        raise _wrong(value, f"{type(value).__name__} {list(shape)}" if shape else "")


def _wrong(value: Any, description: str = "") -> DataError:
    """Return the error for a value that is not an image, with advice for common mistakes."""
    advice = ""
    axes = len(getattr(value, "shape", ()))
    if isinstance(value, list | tuple | Mapping) or axes == 1:
        advice = ". From a batch with labels, pass only the images"
    elif axes == 2 or (axes == 3 and 1 in (value.shape[0], value.shape[2])):
        advice = ". Convert a grey image: PIL.Image.fromarray(array).convert('RGB')"
    kind = description or type(value).__name__
    return DataError(f"an image is given as {kind}; expected {ACCEPTED}{advice}")


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor of one image or of several, of any library.
    Tables and columns of paths have fewer axes."""
    if isinstance(value, np.ndarray):
        return True
    shape = getattr(value, "shape", None)
    is_tensor = hasattr(value, "__array__") or hasattr(value, "asnumpy")
    return is_tensor and shape is not None and len(shape) in (3, 4)


def _read_array(value: Any) -> np.ndarray:
    """Return an array or a tensor as uint8 RGB [height, width, 3], or [N, height, width, 3].

    Colours come first only if the last axis is not 3. Floats are from 0 to 1. Raises `ValueError`
    that describes the array if it is not an image.
    """
    array = _copy_to_host(value)
    described = f"{array.dtype} array {list(array.shape)}"
    is_image = array.ndim in (3, 4) and array.size > 0 and 3 in (array.shape[-1], array.shape[-3])
    if not is_image or (array.dtype.kind != "f" and array.dtype != np.uint8):
        raise ValueError(described)
    if array.shape[-1] != 3:
        array = np.moveaxis(array, -3, -1)
    if array.dtype == np.uint8:
        return array
    low, high = float(array.min()), float(array.max())
    if not 0 <= low <= high <= 1:
        described += f" with values from {low:g} to {high:g}"
        if low < 0:
            described += ", probably normalised"
        raise ValueError(described)
    return np.rint(array.astype(np.float64) * 255).astype(np.uint8)


def _copy_to_host(value: Any) -> np.ndarray:
    """Return NumPy's array of a value, by the value's own methods: no library is imported. Raises
    `ValueError` if it has a type that NumPy lacks."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "asnumpy"):  # MXNet
        return np.asarray(value.asnumpy())
    if hasattr(value, "detach"):  # PyTorch, Paddle: it may have a gradient, or be on a GPU
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except TypeError:  # PyTorch's bfloat16
        raise ValueError(f"{value.dtype} tensor {list(value.shape)}") from None


def find_path(image: Image) -> Path | None:
    """Return the path of an image; None if it has none."""
    if isinstance(image, Encoded):
        return image.path
    return Path(image) if isinstance(image, str | os.PathLike) else None


def read_square(image: Image, recipe: Recipe, out: np.ndarray) -> None:
    """Write an image to `out`, uint8 [eval_crop, eval_crop, 3], as the recipe's evaluation has it.

    An array has no EXIF orientation and is used as it is. Raises `OSError` if the image cannot be
    read, and `ValueError` if it is damaged or not an image; `TooManyPixels`, which is one, if it is
    too large.
    """
    data, orientation = _content(image, recipe)
    prepare_square(data, orientation, recipe, out)


def read_inputs(images: Image | Iterable[Image], recipe: Recipe) -> Iterator[np.ndarray]:
    """Return an iterator over what the network sees of each image: `read_square` normalised,
    float32 [3, eval_crop, eval_crop]. Raises `DataError` as `list_images` does; the iterator names
    the first image that cannot be read."""
    return map(partial(_read_input, recipe), count(), list_images(images))


def _read_input(recipe: Recipe, number: int, image: Image) -> np.ndarray:
    pixels = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    try:
        read_square(image, recipe, pixels)
    except (OSError, ValueError) as error:
        raise DataError(f"{find_path(image) or f'images[{number}]'}: {error}") from None
    normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1), np.float32)


def read_photo(image: Image, recipe: Recipe) -> np.ndarray:
    """Return all of an image at its whole size, uint8 [height, width, 3], turned by its EXIF
    orientation if the recipe says so. Raises errors as `read_square` does."""
    pixels, orientation = _content(image, recipe.replace(dct_scaling=False))
    assert isinstance(pixels, np.ndarray)
    check_ratio(*pixels.shape[:2])
    return np.array(turn_image(pixels, orientation))  # decoders use their memory again


def _content(image: Image, recipe: Recipe) -> tuple[bytes | np.ndarray, int]:
    """Return an image's pixels, uint8 [height, width, 3], or the bytes of a file to be decoded in
    reduced size, and the EXIF orientation by which they are still to be turned."""
    if isinstance(image, np.ndarray):
        return np.ascontiguousarray(image), UPRIGHT
    if isinstance(image, PIL.Image.Image):
        return _read_pillow(image, turns=recipe.exif_orientation), UPRIGHT
    if isinstance(image, Encoded):
        data = image.read()
    elif isinstance(image, str | os.PathLike):
        if Path(image).is_dir():
            raise ValueError("it is a folder; name its files, such as Path(FOLDER).glob('*.jpg')")
        data = read_regular(image, IMAGE)
    else:
        assert isinstance(image, bytes | bytearray | memoryview)
        data = bytes(image)
    orientation = read_orientation(data) if recipe.exif_orientation else UPRIGHT
    return data if recipe.dct_scaling else decode_undamaged(data), orientation


def _read_pillow(image: PIL.Image.Image, *, turns: bool) -> np.ndarray:
    try:
        # Both load the pixels, and the user's image stays as it is.
        return convert_to_rgb(PIL.ImageOps.exif_transpose(image) if turns else image.copy(), image)
    except Exception as error:  # a damaged file makes Pillow's readers raise almost anything
        raise ValueError(str(error) or type(error).__name__) from None
