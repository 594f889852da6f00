"""A recipe, and sizes and facts of images, for the tests of recipes."""

import shlex
from itertools import pairwise

import numpy as np

from lockstep.recipes import Recipe, load_recipe, parse_settings
from lockstep.recipes.my_images import Facts
from lockstep.recipes.nvidia.translation import Translation, translate

RECIPE = Recipe(epochs=3, global_batch_images=16, image_size=32, seed=5)
MIXED = RECIPE.replace(
    mixup_alpha=0.2,
    mixup_coefficient="sample",
    mixup_pairing="reverse",
    augmentations=["solarise", {"name": "solarise", "probability": 0.2}],
)
PHOTOS = Facts(classes=10, images=1000, shorter_side=400, on_gpu=False, precision="fp32")
COUNTS = (2, 7, 20, 100, 1000, 30_000, 1_000_000)
# How the originals' code rounds and samples in its evaluation.
DALI = {
    "eval_side_rounding": "nearest",
    "eval_offset_rounding": "up",
    "eval_sampling": "half_pixel_symmetric",
}
TF1 = {
    "eval_side_rounding": "float32_down",
    "eval_offset_rounding": "down",
    "eval_sampling": "asymmetric",
}


def sizes_of(images: int) -> np.ndarray:
    """Return height and width of this many images, all different: int64 [images, 2], from 20 to 409
    pixels."""
    i = np.arange(images)
    return np.stack([20 + 137 * i % 380, 20 + 211 * i % 390], axis=1)


SIZES = sizes_of(40)


def translate_text(command: str, **how: str) -> Translation:
    return translate(shlex.split(command), **how)


def build_recipe(translation: Translation) -> Recipe:
    """Return the recipe that the printed command trains, read from its words alone."""
    words = translation.command
    settings = [value for word, value in pairwise(words) if word == "--set"]
    return load_recipe(words[words.index("--recipe") + 1]).replace(**parse_settings(settings)[0])


def make_photo(size: int, seed: int = 0) -> np.ndarray:
    """Return an image with smooth colours, edges and noise: uint8 [size, size, 3]."""
    y, x = np.mgrid[:size, :size] / size
    generator = np.random.default_rng(seed)
    colours = np.stack([40 + 180 * x, 220 - 150 * y, 90 + 60 * np.sin(9 * x * y)], axis=-1)
    colours[(x - 0.4) ** 2 + (y - 0.6) ** 2 < 0.05] += 50
    return np.clip(colours + generator.normal(0, 12, colours.shape), 0, 255).astype(np.uint8)
