"""PyTorch. The functions of `lockstep.backends.Backend`."""

import numpy as np
import torch

from lockstep.backends.shared.joining import join
from lockstep.backends.torch.engine import TorchEngine, canonical_tensors, copy_into
from lockstep.backends.torch.launching import starting
from lockstep.backends.torch.measuring import libraries, products
from lockstep.backends.torch.model import Model
from lockstep.backends.torch.tracing import profile
from lockstep.backends.torch.world import TorchWorld, device_name
from lockstep.models.architectures import model_spec
from lockstep.recipes import Execution, Recipe

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


def world(execution: Execution) -> TorchWorld:
    """Join the process group and choose the device."""
    join("torch", starting, execution.distributed, "MASTER_ADDR")
    return TorchWorld(execution)


def engine(
    recipe: Recipe, learning_rates: np.ndarray, world: TorchWorld, execution: Execution
) -> TorchEngine:
    """Build the recipe's model and its compiled step."""
    return TorchEngine(recipe, learning_rates, world, execution)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Model:
    """Return the model as an ordinary `torch.nn.Module` in evaluation mode: normalised NCHW images
    to logits."""
    model = Model(model_spec(recipe.model), recipe)
    copy_into(canonical_tensors(model), tensors, "weights")
    return model.eval()


def devices() -> list[str]:
    """Return the devices that PyTorch sees."""
    gpus = [device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return [*gpus, device_name(torch.device("cpu"))]
