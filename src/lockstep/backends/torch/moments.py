"""The optimizers that keep means of squared gradients: AdamW, LAMB and TensorFlow's RMSProp.

They are written with operations on lists of tensors, for which PyTorch has kernels on GPUs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.recipes import Recipe

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Pace:
    """What is the same for all tensors of a step. Tensors are float32 with one value."""

    recipe: Recipe
    used: Tensor
    """0 if an overflow skips the step, else 1."""
    of_mean: Tensor
    of_root: Tensor
    """The bias corrections of the step (`lockstep.recipes.schedule.bias_corrections`)."""


@dataclass(frozen=True)
class Group:
    """Weights with the same rate and decay, and in the same order what moves them."""

    rate: Tensor
    """float32 []."""
    decay: float
    weights: Tensors
    gradients: Tensors
    """Unscaled and limited."""
    velocities: Tensors
    second_moments: Tensors


def move_group(pace: Pace, group: Group) -> None:
    """Take a step with the weights of a group."""
    if pace.recipe.optimizer == "rmsprop_tf":
        _move_as_rmsprop(pace, group)
    else:
        _move_as_adamw(pace, group)


def _move_as_adamw(pace: Pace, group: Group) -> None:
    """Take a step of AdamW, or of LAMB, which gives a decayed tensor a rate of its own."""
    recipe = pace.recipe
    _approach(group.velocities, group.gradients, (1 - recipe.beta1) * pace.used)
    squares = torch._foreach_mul(group.gradients, group.gradients)
    _approach(group.second_moments, squares, (1 - recipe.beta2) * pace.used)
    roots = torch._foreach_sqrt(group.second_moments)
    torch._foreach_mul_(roots, pace.of_root)
    torch._foreach_add_(roots, recipe.optimizer_epsilon)
    moves = torch._foreach_mul(group.velocities, pace.of_mean)
    torch._foreach_div_(moves, roots)
    if group.decay:
        torch._foreach_add_(moves, group.weights, alpha=group.decay)
    if group.decay and recipe.optimizer == "lamb":
        before = torch.stack(torch._foreach_norm(group.weights))
        after = torch.stack(torch._foreach_norm(moves))
        ratios = torch.where((before > 0) & (after > 0), before / after, 1.0)
        torch._foreach_mul_(moves, ratios.unbind())
    torch._foreach_mul_(moves, group.rate)
    torch._foreach_sub_(group.weights, moves)


def _move_as_rmsprop(pace: Pace, group: Group) -> None:
    recipe = pace.recipe
    gradients = group.gradients
    if group.decay:
        gradients = torch._foreach_add(gradients, group.weights, alpha=group.decay)
    squares = torch._foreach_mul(gradients, gradients)
    _approach(group.second_moments, squares, (1 - recipe.beta2) * pace.used)
    roots = torch._foreach_add(group.second_moments, recipe.optimizer_epsilon)
    torch._foreach_sqrt_(roots)
    steps = torch._foreach_div(gradients, roots)
    torch._foreach_mul_(steps, group.rate)
    torch._foreach_mul_(group.velocities, torch.where(pace.used > 0, recipe.momentum, 1.0))
    torch._foreach_add_(group.velocities, steps)
    torch._foreach_sub_(group.weights, torch._foreach_mul(group.velocities, pace.used))


def _approach(means: Tensors, values: Tensors, share: Tensor) -> None:
    """Move means a share of their distance from new values."""
    distances = torch._foreach_sub(values, means)
    torch._foreach_mul_(distances, share)
    torch._foreach_add_(means, distances)
