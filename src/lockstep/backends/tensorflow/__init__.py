"""TensorFlow. The functions of `lockstep.backends.Backend`."""

from lockstep.backends.tensorflow import (
    framework_import,
)  # before all modules that import the framework

# isort: split
import os

import numpy as np

from lockstep.backends.tensorflow.engine import TensorflowEngine as engine
from lockstep.backends.tensorflow.instruments import libraries, products, profile
from lockstep.backends.tensorflow.model import Model
from lockstep.backends.tensorflow.rank_setup import prepare_ranks
from lockstep.backends.tensorflow.world import TensorflowWorld, Workers, devices
from lockstep.recipes import Execution, Recipe


def world(execution: Execution) -> TensorflowWorld:
    """Join the process group and choose the device."""
    if execution.distributed == "horovod":
        from lockstep.backends.tensorflow.horovod_world import HorovodWorld

        return HorovodWorld(execution)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return TensorflowWorld(execution) if is_alone else Workers(execution)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Model:
    """Return the model as a `tf.Module` in evaluation mode: normalised NHWC images to logits."""
    return Model(recipe, tensors)
