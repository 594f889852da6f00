"""Classes and weights of models to use trained weights with."""

import math

import numpy as np

from lockstep.models.architectures import model_spec, tensors
from lockstep.recipes import Recipe

CLASSES = ("blobs", "bricks", "checks", "dots", "grid", "rays", "rings", "spiral", "stripes", "zigzag")


def random_tensors(recipe: Recipe, seed: int) -> dict[str, np.ndarray]:
    """Return weights that give different images different results: scaled so that activations neither vanish nor grow."""
    random = np.random.default_rng(seed)
    values = {}
    for tensor in tensors(model_spec(recipe.model), recipe.logits):
        drawn = random.standard_normal(tensor.shape, np.float32)
        if tensor.role in ("conv_weight", "fc_weight"):
            drawn *= math.sqrt(2 / math.prod(tensor.shape[1:]))
        elif tensor.role in ("bn_scale", "bn_var"):
            drawn = np.exp(0.2 * drawn)
        values[tensor.name] = drawn
    return values
