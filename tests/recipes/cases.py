"""A recipe, and sizes of images, for tests of the order of images."""

import numpy as np
from hypothesis import settings

from lockstep.recipes import Recipe

EXAMPLES = settings(max_examples=60)

RECIPE = Recipe(epochs=3, global_batch_images=16, image_size=32, seed=5)
MIXED = RECIPE.replace(mixup_alpha=0.2, mixup_coefficient="sample", mixup_pairing="reverse")


def sizes_of(images: int) -> np.ndarray:
    """Return height and width of this many images, all different: int64 [images, 2], from 20 to 409
    pixels."""
    i = np.arange(images)
    return np.stack([20 + 137 * i % 380, 20 + 211 * i % 390], axis=1)


SIZES = sizes_of(40)
