"""Mistakes in the use of a model: the right preprocessing with one thing changed.

A mistake changes how a file is decoded, which square of a photo is seen, how pixels are normalised,
or what is made of the logits.
"""

from collections.abc import Callable, Sequence

import numpy as np
import simplejpeg
from PIL import Image, ImageChops

from lockstep.data.class_order import list_orders
from lockstep.data.decoding.augment import Square, cutting, decode_into, prepare_square, resampling
from lockstep.data.decoding.decode import decode_undamaged, is_plain_jpeg, open_by_pillow
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation, turn_image
from lockstep.proof.record import take_log_softmax
from lockstep.recipes import Recipe
from lockstep.recipes.order import centre_plan

DECODER = "another JPEG decoder"
TRAINING = "a batch that mixes images: batch norm is in training mode"
Colours = float | tuple[float, ...]
"""A number for each colour, or one for all."""
_IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def decode(data: bytes, recipe: Recipe) -> np.ndarray:
    """Return what evaluation decodes of a file, all of it: uint8 [height, width, 3]."""
    pixels = decode_undamaged(data)
    if recipe.exif_orientation:
        pixels = turn_image(pixels, read_orientation(data))
    return np.array(pixels)  # decoders use their memory again


def cut(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return what evaluation sees of decoded pixels: uint8 [S, S, 3]."""
    square = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    prepare_square(pixels, UPRIGHT, recipe, square)
    return square


def _cut_elsewhere(pixels: np.ndarray, recipe: Recipe, **changes: object) -> np.ndarray:
    """Return another square of decoded pixels; `changes` are fields of `Square`."""
    square = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    size = pixels.shape[0], pixels.shape[1]
    plan = centre_plan(recipe, np.zeros(1, np.int64), np.array([size]))
    how = cutting(plan, 0) | resampling(recipe, evaluation=True) | changes
    decode_into(pixels, size, Square(**how), square)
    return square


def _swap_colours(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    return cut(np.ascontiguousarray(pixels[..., ::-1]), recipe)


def _change_filter(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    return cut(pixels, recipe.replace(eval_antialias=not recipe.eval_antialias))


def _change_interpolation(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    names = {"bilinear": "bicubic", "bicubic": "bilinear"}
    return cut(pixels, recipe.replace(interpolation=names[recipe.interpolation]))


def _squash(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    side = recipe.eval_crop
    return _cut_elsewhere(pixels, recipe, resized=(side, side), offset=(0, 0))


def _leave_no_margin(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    return cut(pixels, recipe.replace(eval_resize=recipe.eval_crop))


def _cut_corner(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    return _cut_elsewhere(pixels, recipe, offset=(0, 0))


def _forget_orientation(data: bytes, recipe: Recipe) -> np.ndarray:
    return decode(data, recipe.replace(exif_orientation=not recipe.exif_orientation))


def _invert_cmyk(data: bytes, recipe: Recipe) -> np.ndarray:
    image: Image.Image = open_by_pillow(data)
    if image.mode != "CMYK":
        return decode(data, recipe)
    return np.asarray(ImageChops.invert(image).convert("RGB"))


def _compose(data: bytes, recipe: Recipe, background: str) -> np.ndarray:
    image: Image.Image = open_by_pillow(data)
    if image.mode != "RGBA":
        return decode(data, recipe)
    canvas = Image.new("RGBA", image.size, background)
    return np.asarray(Image.alpha_composite(canvas, image).convert("RGB"))


def _decode_fast(data: bytes, recipe: Recipe) -> np.ndarray:
    """Return a JPEG as decoders do that round more: the other pixels of a decoder are nearer."""
    if not is_plain_jpeg(data):
        return decode(data, recipe)
    pixels = np.asarray(simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True))
    return turn_image(pixels, read_orientation(data)) if recipe.exif_orientation else pixels


def _normalise(squares: np.ndarray, recipe: Recipe, mean: Colours, std: Colours) -> np.ndarray:
    """Return pixels that the right mean and scale turn into what a wrong one makes of squares."""
    wrong = (squares - np.array(mean)) / np.array(std)
    return (wrong * np.array(recipe.std) + np.array(recipe.mean)).astype(np.float32)


def _normalise_twice(squares: np.ndarray, recipe: Recipe) -> np.ndarray:
    return ((squares - np.array(recipe.mean)) / np.array(recipe.std)).astype(np.float32)


def _sort_by(order: int) -> Callable[[np.ndarray, Sequence[str]], np.ndarray]:
    """Return a mistake in names: the outputs are named in one of the orders of other programs."""

    def rename(logits: np.ndarray, classes: Sequence[str]) -> np.ndarray:
        orders = list(list_orders(classes).values())
        if not orders or len(classes) != logits.shape[1]:
            return logits
        places = {name: number for number, name in enumerate(orders[order])}
        return logits[:, list(map(places.__getitem__, classes))]

    return rename


Decoding = Callable[[bytes, Recipe], np.ndarray]
Cutting = Callable[[np.ndarray, Recipe], np.ndarray]
Scaling = Callable[[np.ndarray, Recipe], np.ndarray]
Answering = Callable[[np.ndarray, Sequence[str]], np.ndarray]

DECODINGS: dict[str, Decoding] = {
    "EXIF orientation": _forget_orientation,
    "CMYK inverted": _invert_cmyk,
    "transparency over white": lambda data, recipe: _compose(data, recipe, "white"),
    "transparency over black": lambda data, recipe: _compose(data, recipe, "black"),
    DECODER: _decode_fast,
}
"""Mistakes by name: each decodes a file, uint8 [height, width, 3]."""
OF_FEW = DECODINGS.keys() - {DECODER}
"""Mistakes that few photos show."""
CUTS: dict[str, Cutting] = {
    "colours swapped": _swap_colours,
    "antialiasing": _change_filter,
    "another interpolation": _change_interpolation,
    "squashed to a square": _squash,
    "no margin": _leave_no_margin,
    "corner instead of centre": _cut_corner,
}
"""Each makes a square, uint8 [S, S, 3], of decoded pixels."""
SCALES: dict[str, Scaling] = {
    "pixels not normalised": lambda squares, recipe: _normalise(squares, recipe, 0.0, 1.0),
    "pixels from 0 to 1": lambda squares, recipe: _normalise(squares, recipe, 0.0, 255.0),
    "pixels from -1 to 1": lambda squares, recipe: _normalise(squares, recipe, 127.5, 127.5),
    "ImageNet's mean and scale": lambda squares, recipe: _normalise(squares, recipe, *_IMAGENET),
    "normalised twice": _normalise_twice,
}
"""Each makes other pixels, float32 [N, S, S, 3], of squares, so that the right mean and scale give
what the network sees after the mistake."""
ANSWERS: dict[str, Answering] = {
    "softmax twice": lambda logits, classes: np.exp(take_log_softmax(logits)),
    "classes shifted up by one": lambda logits, classes: np.roll(logits, 1, axis=1),
    "classes shifted down by one": lambda logits, classes: np.roll(logits, -1, axis=1),
    "classes sorted as text": _sort_by(0),
    "classes sorted as numbers": _sort_by(1),
}
"""Each changes logits, [N, logits]."""
ADVICE = {
    "EXIF orientation": "turn photos by their EXIF orientation only if input.exif says so:"
    " PIL.ImageOps.exif_transpose",
    DECODER: "classes must be equal all the same",
    "CMYK inverted": "let the decoder convert CMYK: Image.open(file).convert('RGB')",
    "transparency over white": "drop transparency: Image.open(file).convert('RGB')",
    "transparency over black": "drop transparency: Image.open(file).convert('RGB')",
    "colours swapped": "OpenCV decodes to BGR: reverse the colours, pixels[..., ::-1]",
    "antialiasing": "the resize needs the filter that input.antialias names: Pillow has one, OpenCV"
    " and TensorFlow by default have none",
    "another interpolation": "resize as input.interpolation says",
    "squashed to a square": "resize the shorter side, keep the proportions, and cut out the centre",
    "no margin": "resize the shorter side to input.resize, then cut out the centre",
    "corner instead of centre": "cut out the centre of the resized photo",
    "pixels not normalised": "subtract input.mean, and divide by input.std",
    "pixels from 0 to 1": "input.mean and input.std are those of pixels from 0 to 255",
    "pixels from -1 to 1": "subtract input.mean, and divide by input.std",
    "ImageNet's mean and scale": "subtract input.mean, and divide by input.std",
    "normalised twice": "normalise once: the model or the code before it does it already",
    TRAINING: "call model.eval() before: in training, each photo's answer depends on its batch",
    "softmax twice": "the model's answers are probabilities already: leave out the second softmax",
    "classes shifted up by one": "output 0 is the first class; there is no background class",
    "classes shifted down by one": "output 0 is the first class; there is no background class",
    "classes sorted as text": "name the outputs in the order of model.classes",
    "classes sorted as numbers": "name the outputs in the order of model.classes",
}
"""What to look for in the code, by name."""
