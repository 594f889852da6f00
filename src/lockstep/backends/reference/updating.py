"""What the optimizers do with the gradient of one tensor (`Recipe.optimizer`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    of_mean: float
    """The bias correction of its mean gradient, 1 / (1 - beta1^t)."""
    of_root: float
    """The bias correction of the root of its second moment, 1 / sqrt(1 - beta2^t)."""


def clip(gradients: Mapping[str, np.ndarray], largest: float) -> dict[str, np.ndarray]:
    """Return gradients whose norm, over all of them, is at most `largest`. Smaller ones stay as
    they are."""
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    share = np.minimum(1, largest / (norm + 1e-6))
    return {name: gradient * share for name, gradient in gradients.items()}


def sgd(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Values:
    """v = momentum * v + g + decay * w;  w = w - rate * v.

    With Nesterov's momentum: w = w - rate * (g + decay * w + momentum * v).
    """
    gradient = gradient + pace.decay * values.weight
    velocity = recipe.momentum * values.velocity + gradient
    move = gradient + recipe.momentum * velocity if recipe.nesterov else velocity
    return Values(values.weight - pace.rate * move, velocity)


def adamw(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Values:
    """v = beta1 * v + (1 - beta1) * g;  s = beta2 * s + (1 - beta2) * g^2;  w = w - rate * u."""
    velocity, second_moment = _average(recipe, values, gradient)
    move = _find_direction(recipe, values.weight, velocity, second_moment, pace)
    return Values(values.weight - pace.rate * move, velocity, second_moment)


def lamb(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Values:
    """As `adamw`, but what is decayed moves by rate * |w| in the direction of u."""
    velocity, second_moment = _average(recipe, values, gradient)
    move = _find_direction(recipe, values.weight, velocity, second_moment, pace)
    lengths = np.linalg.norm(values.weight), np.linalg.norm(move)
    if pace.decay and min(lengths) > 0:
        move = move * lengths[0] / lengths[1]
    return Values(values.weight - pace.rate * move, velocity, second_moment)


def rmsprop_tf(recipe: Recipe, values: Values, gradient: np.ndarray, pace: Pace) -> Values:
    """s = beta2 * s + (1 - beta2) * g^2;  v = momentum * v + rate * g / sqrt(s + epsilon);
    w = w - v, where g includes the decay."""
    assert values.second_moment is not None
    gradient = gradient + pace.decay * values.weight
    second_moment = recipe.beta2 * values.second_moment + (1 - recipe.beta2) * gradient**2
    step = pace.rate * gradient / np.sqrt(second_moment + recipe.optimizer_epsilon)
    velocity = recipe.momentum * values.velocity + step
    return Values(values.weight - velocity, velocity, second_moment)


RULES = {"sgd": sgd, "adamw": adamw, "lamb": lamb, "rmsprop_tf": rmsprop_tf}
"""The optimizers by their names in recipes."""


def _average(recipe: Recipe, values: Values, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    assert values.second_moment is not None
    velocity = recipe.beta1 * values.velocity + (1 - recipe.beta1) * gradient
    second_moment = recipe.beta2 * values.second_moment + (1 - recipe.beta2) * gradient**2
    return velocity, second_moment


def _find_direction(
    recipe: Recipe,
    weight: np.ndarray,
    velocity: np.ndarray,
    second_moment: np.ndarray,
    pace: Pace,
) -> np.ndarray:
    """Return u = v / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + epsilon) + decay * w."""
    root = np.sqrt(second_moment) * pace.of_root + recipe.optimizer_epsilon
    return velocity * pace.of_mean / root + pace.decay * weight
