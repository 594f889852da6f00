"""Steps of optimizers by formulas, for frameworks whose tensors have operators. What an optimizer
keeps, and what its weight decay is added to, is in `lockstep.models.optimizers`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe


@dataclass
class Kept:
    """What the optimizer keeps for a weight, which a step moves in place or replaces."""

    velocity: Any
    second_moment: Any = None


@dataclass(frozen=True)
class Step:
    """A step of an optimizer for a weight, or for a vector of weights that move alike."""

    recipe: Recipe
    rate: Any
    decay: Any
    """None: the weight is not decayed."""
    corrections: Mapping[str, Any]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""
    used: Any
    """Whether the step is taken, in the framework's terms; an overflow skips it."""

    def find_move(self, formula: "Formula", weight: Any, kept: Kept, gradient: Any) -> Any:
        """Return what a step with an unscaled, limited gradient subtracts from a weight; update
        what is kept for it."""
        optimizer = OPTIMIZERS[self.recipe.optimizer]
        if self.decay is not None and optimizer.decays == "gradient":
            gradient = gradient + self.decay * weight
        if optimizer.velocity == "mean":
            kept.velocity = self.approach(kept.velocity, gradient, "beta1")
        if optimizer.has_second_moments:
            kept.second_moment = self.approach(kept.second_moment, gradient * gradient, "beta2")
        move = formula(self, kept, gradient)
        if self.decay is not None and optimizer.decays == "move":
            move = move + self.decay * weight
        if self.decay is not None and optimizer.has_trust_ratio:
            move = self.stretch(weight, move)
        return move if optimizer.velocity == "move" else self.rate * move

    def find_root(self, kept: Kept) -> Any:
        """Return the corrected root of the second moment, increased by epsilon."""
        root = kept.second_moment.sqrt() * self.corrections["root"]
        return root + self.recipe.optimizer_epsilon

    def approach(self, mean: Any, value: Any, beta: str) -> Any:
        """Give a new value the share 1 - beta in a mean, if the step is taken; return the mean."""
        raise NotImplementedError

    def stretch(self, weight: Any, move: Any) -> Any:
        """Return a move with the length of the weight, unless one of both lengths is 0."""
        raise NotImplementedError


Formula = Callable[[Any, Kept, Any], Any]
"""A function of a step, of what is kept, and of the gradient. It returns how the weight moves,
without the learning rate unless the velocity has it. Means have their values after the step; any
other velocity is updated here."""


def adamw(step: Step, kept: Kept, gradient: Any) -> Any:
    """The corrected mean of gradients divided by the root of that of their squares."""
    return kept.velocity * step.corrections["mean"] / step.find_root(kept)


def nadam(step: Step, kept: Kept, gradient: Any) -> Any:
    """As `adamw`, with the mean of gradients one step ahead."""
    ahead = kept.velocity * step.corrections["nesterov_mean"]
    return (ahead + gradient * step.corrections["nesterov_gradient"]) / step.find_root(kept)


FORMULAS: dict[str, Formula] = {"adamw": adamw, "lamb": adamw, "nadam": nadam}
"""By the names in `OPTIMIZERS`: those that need operators alone. A backend has the others."""
