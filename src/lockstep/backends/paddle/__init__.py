"""PaddlePaddle. The functions of `lockstep.backends.Backend`."""

from lockstep.backends.paddle import loading  # before all modules that import the framework

# isort: split
import numpy as np

from lockstep.backends.paddle.engine import PaddleEngine
from lockstep.backends.paddle.launching import prepare_ranks
from lockstep.backends.paddle.measuring import libraries, products
from lockstep.backends.paddle.model import Model
from lockstep.backends.paddle.tracing import profile
from lockstep.backends.paddle.world import PaddleWorld, devices
from lockstep.recipes import Execution, Recipe


def world(execution: Execution) -> PaddleWorld:
    """Join the process group and choose the device."""
    return PaddleWorld(execution)


def engine(
    recipe: Recipe, learning_rates: np.ndarray, world: PaddleWorld, execution: Execution
) -> PaddleEngine:
    """Build the recipe's model and its compiled step."""
    return PaddleEngine(recipe, learning_rates, world, execution)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Model:
    """Return the model as a `paddle.nn.Layer` in evaluation mode: normalised NCHW images to
    logits."""
    return Model(recipe, tensors)
