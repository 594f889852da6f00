"""PyTorch. The functions of `lockstep.backends.Backend`: `world` and `engine` are classes."""

import numpy as np

from lockstep.backends.torch.engine import TorchEngine as engine
from lockstep.backends.torch.engine import canonical_tensors, copy_into
from lockstep.backends.torch.instruments import libraries, products, profile
from lockstep.backends.torch.model import Network
from lockstep.backends.torch.rank_setup import prepare_ranks
from lockstep.backends.torch.world import TorchWorld as world
from lockstep.backends.torch.world import devices
from lockstep.models.architectures import model_spec
from lockstep.recipes import Recipe


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Network:
    """Return the network as an ordinary `torch.nn.Module` in evaluation mode: normalised NCHW
    images to logits."""
    model = Network(recipe.spec, recipe)
    copy_into(canonical_tensors(model), tensors, "weights")
    return model.eval()
