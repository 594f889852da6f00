"""Steps by the formulas of the optimizers other than SGD (`lockstep.models.optimizers`).

They are written with operations on lists of tensors, for which PyTorch has kernels on GPUs.
"""

import torch
from torch import Tensor

from lockstep.backends.shared.formulas import Formula, Kept, Step
from lockstep.models.optimizers import OPTIMIZERS

Tensors = list[Tensor] | tuple[Tensor, ...]


class ListStep(Step):
    """A step for lists of tensors with the same rate and decay, and of what is kept for them.

    The rate and the corrections are float32 []; so is `used`, 0 if an overflow skips the step, else
    1.
    """

    def move(self, formula: Formula, weights: Tensors, kept: Kept, gradients: Tensors) -> None:
        """Take the step with gradients, unscaled and limited."""
        optimizer = OPTIMIZERS[self.recipe.optimizer]
        if self.decay is not None and optimizer.decays == "gradient":
            gradients = torch._foreach_add(gradients, weights, alpha=self.decay)
        if optimizer.velocity == "mean":
            self.approach(kept.velocity, gradients, "beta1")
        if optimizer.has_second_moments:
            self.approach(kept.second_moment, torch._foreach_mul(gradients, gradients), "beta2")
        moves = formula(self, kept, gradients)
        if self.decay is not None and optimizer.decays == "move":
            torch._foreach_add_(moves, weights, alpha=self.decay)
        if self.decay is not None and optimizer.has_trust_ratio:
            self.stretch(weights, moves)
        if optimizer.velocity != "move":
            torch._foreach_mul_(moves, self.rate)
        torch._foreach_sub_(weights, moves)

    def find_root(self, kept: Kept) -> Tensors:
        """Return the corrected roots of second moments, increased by epsilon."""
        roots = torch._foreach_sqrt(kept.second_moment)
        torch._foreach_mul_(roots, self.corrections["root"])
        torch._foreach_add_(roots, self.recipe.optimizer_epsilon)
        return roots

    def approach(self, mean: Tensors, value: Tensors, beta: str) -> None:
        """Give new values the share 1 - beta in means, if the step is taken."""
        distances = torch._foreach_sub(value, mean)
        torch._foreach_mul_(distances, (1 - getattr(self.recipe, beta)) * self.used)
        torch._foreach_add_(mean, distances)

    def stretch(self, weight: Tensors, move: Tensors) -> None:
        """Give moves the lengths of their weights, unless one of both is 0."""
        before = torch.stack(torch._foreach_norm(weight))
        after = torch.stack(torch._foreach_norm(move))
        ratios = torch.where((before > 0) & (after > 0), before / after, 1.0)
        torch._foreach_mul_(move, ratios.unbind())


def _adamw(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    moves = torch._foreach_mul(kept.velocity, step.corrections["mean"])
    torch._foreach_div_(moves, step.find_root(kept))
    return moves


def _nadam(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    moves = torch._foreach_mul(kept.velocity, step.corrections["nesterov_mean"])
    corrected = torch._foreach_mul(gradients, step.corrections["nesterov_gradient"])
    torch._foreach_add_(moves, corrected)
    torch._foreach_div_(moves, step.find_root(kept))
    return moves


def _rmsprop_tf(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    roots = torch._foreach_add(kept.second_moment, step.recipe.optimizer_epsilon)
    torch._foreach_sqrt_(roots)
    changes = torch._foreach_div(gradients, roots)
    torch._foreach_mul_(changes, step.rate)
    torch._foreach_mul_(kept.velocity, torch.where(step.used > 0, step.recipe.momentum, 1.0))
    torch._foreach_add_(kept.velocity, changes)
    return torch._foreach_mul(kept.velocity, step.used)


FORMULAS: dict[str, Formula | None] = {
    "sgd": None,
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`; they return new tensors. SGD is PyTorch's own operation."""
