"""What the optimizers do with the gradient of one tensor (`Recipe.optimizer`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe


class Values(NamedTuple):
    """A parameter with what the optimizer keeps of its gradients, all of one shape."""

    weight: np.ndarray
    velocity: np.ndarray
    second_moment: np.ndarray | None = None


@dataclass(frozen=True)
class Pace:
    """What a step does to all values of a tensor alike."""

    rate: float
    """Learning rate of the tensor."""
    decay: float
    """Its weight decay; 0 if it is not decayed."""
    corrections: Mapping[str, float]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""


def clip(gradients: Mapping[str, np.ndarray], largest: float) -> dict[str, np.ndarray]:
    """Return gradients whose norm, over all of them, is at most `largest`. Smaller ones stay as
    they are."""
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    share = np.minimum(1, largest / (norm + 1e-6))
    return {name: gradient * share for name, gradient in gradients.items()}


def step(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Values:
    """Return a tensor's values after a step with its gradient, unscaled and limited."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    if optimizer.decays == "gradient":
        gradient = gradient + pace.decay * values.weight
    velocity = values.velocity
    if optimizer.velocity == "mean":
        velocity = recipe.beta1 * velocity + (1 - recipe.beta1) * gradient
    second_moment = values.second_moment
    if second_moment is not None:
        second_moment = recipe.beta2 * second_moment + (1 - recipe.beta2) * gradient**2
    values = Values(values.weight, velocity, second_moment)
    move, velocity = FORMULAS[recipe.optimizer](recipe, values, gradient, pace)
    if optimizer.decays == "move":
        move = move + pace.decay * values.weight
    if optimizer.has_trust_ratio and pace.decay:
        lengths = np.linalg.norm(values.weight), np.linalg.norm(move)
        if min(lengths) > 0:
            move = move * lengths[0] / lengths[1]
    if optimizer.velocity != "move":
        move = pace.rate * move
    return Values(values.weight - move, velocity, second_moment)


Moved = tuple[np.ndarray, np.ndarray]
"""How a weight moves, without the learning rate unless the velocity has it, and the new
velocity."""


def sgd(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Moved:
    """v = momentum * v + g, which is the move. With Nesterov's momentum: g + momentum * v."""
    velocity = recipe.momentum * values.velocity + gradient
    move = gradient + recipe.momentum * velocity if recipe.nesterov else velocity
    return move, velocity


def adamw(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Moved:
    """v / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + epsilon)."""
    move = values.velocity * pace.corrections["mean"] / _find_root(recipe, values, pace)
    return move, values.velocity


def nadam(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Moved:
    """As `adamw`, with a mean that is one step ahead: the corrected sum of v and g."""
    ahead = values.velocity * pace.corrections["nesterov_mean"]
    ahead = ahead + gradient * pace.corrections["nesterov_gradient"]
    return ahead / _find_root(recipe, values, pace), values.velocity


def rmsprop_tf(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Moved:
    """v = momentum * v + rate * g / sqrt(s + epsilon), which is the move."""
    assert values.second_moment is not None
    change = pace.rate * gradient / np.sqrt(values.second_moment + recipe.optimizer_epsilon)
    velocity = recipe.momentum * values.velocity + change
    return velocity, velocity


FORMULAS: dict[str, Callable[[Recipe, Values, np.ndarray, Pace], Moved]] = {
    "sgd": sgd,
    "adamw": adamw,
    "lamb": adamw,
    "nadam": nadam,
    "rmsprop_tf": rmsprop_tf,
}
"""By the names in `OPTIMIZERS`. Means are those after the step. The gradient includes decay if the
optimizer decays gradients."""


def _find_root(recipe: Recipe, values: Values, pace: Pace) -> np.ndarray:
    """Return the corrected root of the second moment, increased by epsilon."""
    assert values.second_moment is not None
    root = np.sqrt(values.second_moment)
    return root * pace.corrections["root"] + recipe.optimizer_epsilon


class LossScale(LossScaleState):
    """The loss scale in Python's numbers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.value = self._initial
        self._good = 0
        self._bad = 0

    def adapt(self, overflow: bool) -> None:
        """Adapt the scale to a step with or without overflow."""
        self._good = 0 if overflow else self._good + 1
        self._bad = self._bad + 1 if overflow else 0
        if self._good >= self._recipe.loss_scale_growth_steps:
            self.value = self.value * self._recipe.loss_scale_growth
            self._good = 0
        if self._bad >= self._recipe.loss_scale_backoff_steps:
            self.value = self.value * self._recipe.loss_scale_backoff
            self._bad = 0

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value, self._good, self._bad

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value = scale
        self._good = good
        self._bad = bad
