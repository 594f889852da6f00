"""The optimizers that keep more than SGD's velocities (`lockstep.models.optimizers`).

They are written with operations on lists of tensors, for which PyTorch has kernels on GPUs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Pace:
    """What is the same for all tensors of a step. Tensors are float32 with one value."""

    recipe: Recipe
    used: Tensor
    """0 if an overflow skips the step, else 1."""
    corrections: Mapping[str, Tensor]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""


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
    optimizer = OPTIMIZERS[pace.recipe.optimizer]
    formula = FORMULAS[pace.recipe.optimizer]
    assert formula is not None
    if group.decay and optimizer.decays == "gradient":
        gradients = torch._foreach_add(group.gradients, group.weights, alpha=group.decay)
        group = replace(group, gradients=gradients)
    moves = formula(pace, group)
    if group.decay and optimizer.decays == "move":
        torch._foreach_add_(moves, group.weights, alpha=group.decay)
    if group.decay and optimizer.has_trust_ratio:
        before = torch.stack(torch._foreach_norm(group.weights))
        after = torch.stack(torch._foreach_norm(moves))
        ratios = torch.where((before > 0) & (after > 0), before / after, 1.0)
        torch._foreach_mul_(moves, ratios.unbind())
    if optimizer.velocity != "move":
        torch._foreach_mul_(moves, group.rate)
    torch._foreach_sub_(group.weights, moves)


def _adamw(pace: Pace, group: Group) -> Tensors:
    roots = _average(pace, group)
    moves = torch._foreach_mul(group.velocities, pace.corrections["mean"])
    torch._foreach_div_(moves, roots)
    return moves


def _nadam(pace: Pace, group: Group) -> Tensors:
    roots = _average(pace, group)
    moves = torch._foreach_mul(group.velocities, pace.corrections["nesterov_mean"])
    gradients = torch._foreach_mul(group.gradients, pace.corrections["nesterov_gradient"])
    torch._foreach_add_(moves, gradients)
    torch._foreach_div_(moves, roots)
    return moves


def _rmsprop_tf(pace: Pace, group: Group) -> Tensors:
    _average_squares(pace, group)
    roots = torch._foreach_add(group.second_moments, pace.recipe.optimizer_epsilon)
    torch._foreach_sqrt_(roots)
    steps = torch._foreach_div(group.gradients, roots)
    torch._foreach_mul_(steps, group.rate)
    torch._foreach_mul_(group.velocities, torch.where(pace.used > 0, pace.recipe.momentum, 1.0))
    torch._foreach_add_(group.velocities, steps)
    return torch._foreach_mul(group.velocities, pace.used)


Formula = Callable[[Pace, Group], Tensors]
FORMULAS: dict[str, Formula | None] = {
    "sgd": None,  # PyTorch's own operation
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`. A formula updates what the optimizer keeps and returns new tensors:
how weights move, without the learning rate unless velocities have it."""


def _average(pace: Pace, group: Group) -> Tensors:
    """Update the means of gradients and of their squares; return the corrected roots of these,
    increased by epsilon."""
    _approach(group.velocities, group.gradients, (1 - pace.recipe.beta1) * pace.used)
    _average_squares(pace, group)
    roots = torch._foreach_sqrt(group.second_moments)
    torch._foreach_mul_(roots, pace.corrections["root"])
    torch._foreach_add_(roots, pace.recipe.optimizer_epsilon)
    return roots


def _average_squares(pace: Pace, group: Group) -> None:
    squares = torch._foreach_mul(group.gradients, group.gradients)
    _approach(group.second_moments, squares, (1 - pace.recipe.beta2) * pace.used)


def _approach(means: Tensors, values: Tensors, share: Tensor) -> None:
    """Move means a share of their distance from new values."""
    distances = torch._foreach_sub(values, means)
    torch._foreach_mul_(distances, share)
    torch._foreach_add_(means, distances)
