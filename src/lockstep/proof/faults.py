"""Mistakes in the use of a model: the right preprocessing with one thing changed.

A mistake changes how a file is decoded, which square of a photo is seen, how pixels are normalised,
or how the logits are used.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageChops

from lockstep.data.class_order import list_orders
from lockstep.data.decoding.augment import Square, cutting, decode_into, prepare_square, resampling
from lockstep.data.decoding.decode import decode_undamaged, is_plain_jpeg, open_by_pillow
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation, turn_image
from lockstep.proof.diagnosis import DECODER
from lockstep.proof.record import take_log_softmax
from lockstep.recipes import Recipe
from lockstep.recipes.order import centre_plan

TRAINING = "a batch that mixes images: batch norm is in training mode"
OF_FEW = ("EXIF orientation", "CMYK inverted", "transparency over white", "transparency over black")
"""Mistakes that few photos show."""
_IMAGENET = np.array((123.675, 116.28, 103.53)), np.array((58.395, 57.12, 57.375))
_ORDERS = ("classes sorted as text", "classes sorted as numbers")
"""The outputs are named in an order of other programs."""


def decode(data: bytes, recipe: Recipe) -> np.ndarray:
    """Return all pixels that evaluation decodes from a file: uint8 [height, width, 3]."""
    pixels = decode_undamaged(data)
    if recipe.exif_orientation:
        pixels = turn_image(pixels, read_orientation(data))
    return np.array(pixels)  # decoders use their memory again


def cut(pixels: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return what evaluation sees of decoded pixels: uint8 [S, S, 3]."""
    square = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    prepare_square(pixels, UPRIGHT, recipe, square)
    return square


def list_decodings(data: bytes, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the pixels of a file after each decoding mistake, uint8 [height, width, 3]. Mistakes
    that do not concern its kind are left out."""
    forgotten = recipe.replace(exif_orientation=not recipe.exif_orientation)
    photos = {"EXIF orientation": decode(data, forgotten)}
    image: Image.Image = open_by_pillow(data)
    if image.mode == "CMYK":
        photos["CMYK inverted"] = np.asarray(ImageChops.invert(image).convert("RGB"))
    if image.mode == "RGBA":
        for background in ("white", "black"):
            canvas = Image.new("RGBA", image.size, background)
            canvas.alpha_composite(image)
            photos[f"transparency over {background}"] = np.asarray(canvas.convert("RGB"))
    if is_plain_jpeg(data):  # as decoders do that round more: the others are nearer
        pixels = np.asarray(simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True))
        orientation = read_orientation(data) if recipe.exif_orientation else UPRIGHT
        photos[DECODER] = turn_image(pixels, orientation)
    return photos


def _cut_elsewhere(pixels: np.ndarray, recipe: Recipe, changes: dict[str, Any]) -> np.ndarray:
    """Return another square of decoded pixels; `changes` are fields of `Square`."""
    square = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    size = pixels.shape[0], pixels.shape[1]
    plan = centre_plan(recipe, np.zeros(1, np.int64), np.array([size]))
    how = cutting(plan, 0) | resampling(recipe, evaluation=True) | changes
    decode_into(pixels, size, Square(**how), square)
    return square


def list_cuts(pixels: np.ndarray, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the squares, uint8 [S, S, 3], that each mistake cuts from decoded pixels."""
    swapped = np.ascontiguousarray(pixels[..., ::-1])
    squares = {"colours swapped": cut(swapped, recipe)}
    side = recipe.eval_crop
    others = {"bilinear": "bicubic", "bicubic": "bilinear"}
    fields: dict[str, dict[str, Any]] = {
        "antialiasing": {"eval_antialias": not recipe.eval_antialias},
        "another interpolation": {"interpolation": others[recipe.interpolation]},
        "no margin": {"eval_resize": side},
    }
    for name, changes in fields.items():
        squares[name] = cut(pixels, recipe.replace(**changes))
    places: dict[str, dict[str, Any]] = {
        "squashed to a square": {"resized": (side, side), "offset": (0, 0)},
        "corner instead of centre": {"offset": (0, 0)},
    }
    for name, changes in places.items():
        squares[name] = _cut_elsewhere(pixels, recipe, changes)
    return squares


def list_scales(squares: np.ndarray, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return for each mistake pixels, float32 [N, S, S, 3], that the right mean and scale turn into
    what the network sees after it."""
    mean, std = np.array(recipe.mean), np.array(recipe.std)
    wrong = {
        "pixels not normalised": squares,
        "pixels from 0 to 1": squares / 255,
        "pixels from -1 to 1": squares / 127.5 - 1,
        "ImageNet's mean and scale": (squares - _IMAGENET[0]) / _IMAGENET[1],
        "normalised twice": ((squares - mean) / std - mean) / std,
    }
    pixels = {}
    for name, values in wrong.items():
        pixels[name] = (values * std + mean).astype(np.float32)
    return pixels


def list_answers(logits: np.ndarray, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the logits [N, logits] after each mistake in using the right ones."""
    answers = {
        "softmax twice": np.exp(take_log_softmax(logits)),
        "classes shifted up by one": np.roll(logits, 1, axis=1),
        "classes shifted down by one": np.roll(logits, -1, axis=1),
    }
    if len(classes) == logits.shape[1]:
        for name, order in zip(_ORDERS, list_orders(classes).values(), strict=False):
            places = dict(zip(order, range(len(order)), strict=True))
            answers[name] = logits[:, [places[label] for label in classes]]
    return answers


ADVICE = {
    "EXIF orientation": "turn photos by their EXIF orientation only if input.exif says so:"
    " PIL.ImageOps.exif_transpose",
    DECODER: "classes must still be equal",
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
    "normalised twice": "normalise once: the model, or the code before it, already does so",
    TRAINING: "call model.eval() before: in training, each photo's answer depends on its batch",
    "softmax twice": "the model's answers are probabilities already: leave out the second softmax",
    "classes shifted up by one": "output 0 is the first class; there is no background class",
    "classes shifted down by one": "output 0 is the first class; there is no background class",
    "classes sorted as text": "name the outputs in the order of model.classes",
    "classes sorted as numbers": "name the outputs in the order of model.classes",
}
"""What to look for in the code, by name."""
