"""PaddlePaddle. The functions of `lockstep.backends.Backend`: `world` and `engine` are classes."""

from lockstep.backends.paddle import (
    framework_import,
)  # before all modules that import the framework

# isort: split
import numpy as np

from lockstep.backends.paddle.engine import PaddleEngine as engine
from lockstep.backends.paddle.instruments import libraries, products, profile
from lockstep.backends.paddle.model import Model
from lockstep.backends.paddle.rank_setup import prepare_ranks
from lockstep.backends.paddle.world import PaddleWorld as world
from lockstep.backends.paddle.world import devices
from lockstep.recipes import Recipe


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Model:
    """Return the model as a `paddle.nn.Layer` in evaluation mode: normalised NCHW images to
    logits."""
    return Model(recipe, tensors)
