"""TensorFlow. The functions of `lockstep.backends.Backend`."""

from lockstep.backends.tensorflow import loading  # noqa: F401, I001 - before all modules that import TensorFlow

import os

import numpy as np

from lockstep.backends import refuse_quantisation
from lockstep.backends.tensorflow.engine import TensorflowEngine
from lockstep.backends.tensorflow.measuring import libraries, products
from lockstep.backends.tensorflow.model import Model
from lockstep.backends.tensorflow.tracing import profile
from lockstep.backends.tensorflow.launching import starting
from lockstep.backends.tensorflow.world import TensorflowWorld, Workers, devices
from lockstep.recipes import Execution, Recipe
from lockstep.backends.shared.joining import join

__all__ = [
    "devices",
    "engine",
    "libraries",
    "load_module",
    "products",
    "profile",
    "starting",
    "world",
]


def world(execution: Execution) -> TensorflowWorld:
    """Join the process group and choose the device."""
    join("tensorflow", starting, execution.distributed, "TF_CONFIG")
    if execution.distributed == "horovod":
        from lockstep.backends.tensorflow.horovod_world import HorovodWorld

        return HorovodWorld(execution)
    return (
        TensorflowWorld(execution)
        if os.environ.get("WORLD_SIZE", "1") == "1"
        else Workers(execution)
    )


def engine(
    recipe: Recipe, learning_rates: np.ndarray, world: TensorflowWorld, execution: Execution
) -> TensorflowEngine:
    """Build the recipe's model and its compiled step."""
    refuse_quantisation(recipe, "tensorflow")
    return TensorflowEngine(recipe, learning_rates, world, execution)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Model:
    """Return the model as a `tf.Module` in evaluation mode: normalised NHWC images to logits."""
    return Model(recipe, tensors)
