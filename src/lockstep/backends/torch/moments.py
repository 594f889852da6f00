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


def move_group(
    pace: Pace,
    rate: Tensor,
    decay: float,
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    second_moments: Tensors,
) -> None:
    """Move weights with the same rate and decay, by gradients that are unscaled and limited."""
    move = _move_as_rmsprop if pace.recipe.optimizer == "rmsprop_tf" else _move_as_adamw
    move(pace, rate, decay, weights, gradients, velocities, second_moments)


def _move_as_adamw(
    pace: Pace,
    rate: Tensor,
    decay: float,
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    second_moments: Tensors,
) -> None:
    """Take a step of AdamW, or of LAMB, which gives a decayed tensor a rate of its own."""
    recipe = pace.recipe
    _approach(velocities, gradients, (1 - recipe.beta1) * pace.used)
    squares = torch._foreach_mul(gradients, gradients)
    _approach(second_moments, squares, (1 - recipe.beta2) * pace.used)
    roots = torch._foreach_sqrt(second_moments)
    torch._foreach_mul_(roots, pace.of_root)
    torch._foreach_add_(roots, recipe.optimizer_epsilon)
    moves = torch._foreach_mul(velocities, pace.of_mean)
    torch._foreach_div_(moves, roots)
    if decay:
        torch._foreach_add_(moves, weights, alpha=decay)
    if decay and recipe.optimizer == "lamb":
        before = torch.stack(torch._foreach_norm(weights))
        after = torch.stack(torch._foreach_norm(moves))
        ratios = torch.where((before > 0) & (after > 0), before / after, 1.0)
        torch._foreach_mul_(moves, ratios.unbind())
    torch._foreach_mul_(moves, rate)
    torch._foreach_sub_(weights, moves)


def _move_as_rmsprop(
    pace: Pace,
    rate: Tensor,
    decay: float,
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    second_moments: Tensors,
) -> None:
    recipe = pace.recipe
    if decay:
        gradients = torch._foreach_add(gradients, weights, alpha=decay)
    squares = torch._foreach_mul(gradients, gradients)
    _approach(second_moments, squares, (1 - recipe.beta2) * pace.used)
    roots = torch._foreach_add(second_moments, recipe.optimizer_epsilon)
    torch._foreach_sqrt_(roots)
    steps = torch._foreach_div(gradients, roots)
    torch._foreach_mul_(steps, rate)
    torch._foreach_mul_(velocities, torch.where(pace.used > 0, recipe.momentum, 1.0))
    torch._foreach_add_(velocities, steps)
    torch._foreach_sub_(weights, torch._foreach_mul(velocities, pace.used))


def _approach(means: Tensors, values: Tensors, share: Tensor) -> None:
    """Move means a share of their distance from new values."""
    distances = torch._foreach_sub(values, means)
    torch._foreach_mul_(distances, share)
    torch._foreach_add_(means, distances)
