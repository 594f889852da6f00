"""Frozen tensors: parameters without gradients, and batch norms in evaluation mode.

Autograd computes a gradient only of what leads to a parameter that wants one, so nothing is
computed backwards below the lowest trained tensor, and the activations there are not kept.
"""

from collections.abc import Iterable

from torch import nn

from lockstep.recipes import Recipe
from lockstep.recipes.trained_tensors import frozen_norms, rate_factors


def freeze(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    """Turn off the gradients of a model's frozen parameters. Return its frozen batch norms."""
    trained = rate_factors(recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return [model.get_submodule(name) for name in frozen_norms(recipe)]


def set_training_mode(model: nn.Module, frozen: Iterable[nn.Module]) -> None:
    """Set a model to training mode, and its frozen batch norms to evaluation mode, in which they
    compute with their running statistics and leave them as they are."""
    model.train()
    for norm in frozen:
        norm.eval()
