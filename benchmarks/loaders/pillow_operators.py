"""RandAugment's operators by Pillow alone, on its images, as torchvision runs them in a DataLoader.

The tests compare Lockstep's operators with them, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial

from PIL import Image, ImageEnhance, ImageOps

from lockstep.recipes.operations import Operation

Fill = tuple[int, int, int]
_Matrix = tuple[float, float, float, float, float, float]


def _map(
    make_matrix: Callable[[float, int], _Matrix],
    image: Image.Image,
    number: float,
    mode: Image.Resampling,
    fill: Fill,
) -> Image.Image:
    """Change the geometry of an image as a matrix says, which a number and the side make."""
    matrix = make_matrix(number, image.width)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, mode, fillcolor=fill)


def _rotate(image: Image.Image, degrees: float, mode: Image.Resampling, fill: Fill) -> Image.Image:
    return image.rotate(degrees, mode, fillcolor=fill)


def _add_below_128(image: Image.Image, added: float) -> Image.Image:
    table = [min(255, level + int(added)) for level in range(128)]
    return image.point([*table, *range(128, 256)] * 3)


COLOURS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "colour": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "equalise": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "posterise": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "solarise": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "solarise_add": _add_below_128,
}
GEOMETRY: dict[str, Callable[[Image.Image, float, Image.Resampling, Fill], Image.Image]] = {
    "rotate": _rotate,
    "shear_x": partial(_map, lambda x, _: (1, x, 0, 0, 1, 0)),
    "shear_y": partial(_map, lambda x, _: (1, 0, 0, x, 1, 0)),
    "translate_x": partial(_map, lambda x, side: (1, 0, x * side, 0, 1, 0)),
    "translate_y": partial(_map, lambda x, side: (1, 0, 0, 0, 1, x * side)),
    "move_x": partial(_map, lambda x, _: (1, 0, -int(x), 0, 1, 0)),
    "move_y": partial(_map, lambda x, _: (1, 0, 0, 0, 1, -int(x))),
    "move_x_by_share": partial(_map, lambda x, side: (1, 0, -int(x * side), 0, 1, 0)),
    "move_y_by_share": partial(_map, lambda x, side: (1, 0, 0, 0, 1, -int(x * side))),
}
MODES = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def apply_operations(
    image: Image.Image, operations: Sequence[Operation], fill: Fill
) -> Image.Image:
    """Return an RGB image after operations, one after the other."""
    for operator, number, interpolation in operations:
        if operator in COLOURS:
            image = COLOURS[operator](image, number)
        else:
            image = GEOMETRY[operator](image, number, MODES[interpolation], fill)
    return image
