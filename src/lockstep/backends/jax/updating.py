"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax.loss_scale import Adaptation, LossScale, Scale
from lockstep.backends.jax.model import Array, Arrays
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import bias_corrections, ema_decays
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


class Values(NamedTuple):
    """Everything that a step changes, on the device, by canonical names."""

    tensors: Arrays
    velocity: Arrays
    second_moments: Arrays
    """Means of squared gradients; empty with SGD."""
    ema: Arrays
    """Moving averages; empty without `ema_decay`."""
    scale: Scale


class Pace(NamedTuple):
    """What is different in every step: float32 numbers, or as a table, arrays [steps]."""

    rate: Array
    share: Array
    """That of the new values in moving averages."""
    of_mean: Array
    """Bias correction of a mean of gradients."""
    of_root: Array
    """Bias correction of the root of a mean of squared gradients."""


class Numbers(NamedTuple):
    """The optimizer's numbers, float32. They are arguments of a step, so that recipes which differ
    in them alone share a compiled step."""

    factors: Array
    """Of the learning rate, for every trained tensor."""
    decays: Array
    """Weight decay of every trained tensor."""
    momentum: Array
    share1: Array
    """1 - beta1, which float32's beta1 would not give exactly."""
    share2: Array
    epsilon: Array
    adaptation: Adaptation


def make_table(recipe: Recipe, learning_rates: np.ndarray) -> Pace:
    """Return the table of all steps of a run."""
    steps = len(learning_rates)
    shares = 1 - ema_decays(recipe, steps)
    columns = (learning_rates, shares, *bias_corrections(recipe, steps))
    return Pace(*(column.astype(np.float32) for column in columns))


def read_numbers(recipe: Recipe) -> Numbers:
    """Return a recipe's numbers."""
    factors = rate_factors(recipe)
    decays = [
        recipe.weight_decay * recipe.decays(tensor)
        for tensor in recipe.list_tensors()
        if tensor.name in factors
    ]
    return Numbers(
        np.array(list(factors.values()), np.float32),
        np.array(decays, np.float32),
        np.float32(recipe.momentum),
        np.float32(1 - recipe.beta1),
        np.float32(1 - recipe.beta2),
        np.float32(recipe.optimizer_epsilon),
        LossScale(recipe).adaptation,
    )


def drop_numbers(recipe: Recipe) -> Recipe:
    """Return the recipe of a compiled step: with the defaults of all fields that are its arguments
    (`Numbers`, `Pace`)."""
    defaults = Recipe()
    fields = {name: getattr(defaults, name) for name in _ARGUMENTS}
    return recipe.replace(**fields, ema_decay=0.5 if recipe.ema_decay else 0.0)


_ARGUMENTS = (
    *("lr", "lr_multipliers", "lr_depth_decay", "weight_decay", "weight_decay_roles", "momentum"),
    *("beta1", "beta2", "optimizer_epsilon", "loss_scale", "loss_scale_growth"),
    *("loss_scale_growth_steps", "loss_scale_backoff", "loss_scale_backoff_steps"),
)


class Update:
    """The optimizer of a run, as functions of its state."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._trained = list(rate_factors(recipe))
        self._moving = changing_tensors(recipe) if recipe.ema_decay else []
        self._scale = LossScale(recipe)
        # As a function of its own, it is traced once for every shape.
        self._move = jax.jit(self._move_tensor)

    def take(
        self,
        values: Values,
        gradients: Mapping[str, Array],
        removed: Arrays,
        pace: Pace,
        numbers: Numbers,
    ) -> Values:
        """Return the values after a step with these gradients of trained tensors. Masks have
        `removed` weights: bool, by name."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        gradients = {
            name: jnp.where(removed[name], 0.0, gradient) if name in removed else gradient
            for name, gradient in gradients.items()
        }
        gradients, used, scale = self._scale.step(values.scale, gradients, numbers.adaptation)
        if self._recipe.clip_norm:
            gradients = self._clip(gradients)
        kept = (values.tensors, values.velocity, values.second_moments)
        moved = tuple(dict(old) for old in kept)
        for i, name in enumerate(self._trained):
            before = [old[name] for old in kept if old]
            rate = pace.rate * numbers.factors[i]
            after = self._move(
                before, gradients[name], rate, numbers.decays[i], pace, numbers, used
            )
            for place, new in zip(moved, after, strict=False):
                place[name] = new
        tensors, velocity, second_moments = moved
        ema = self._average(values.ema, tensors, pace)
        return Values(tensors, velocity, second_moments, ema, scale)

    def _clip(self, gradients: Arrays) -> Arrays:
        """Return gradients whose norm, over all of them, is at most `clip_norm`."""
        squares = jnp.stack([jnp.sum(jnp.square(gradient)) for gradient in gradients.values()])
        norm = jnp.sqrt(jnp.sum(squares))
        share = jnp.minimum(1.0, self._recipe.clip_norm / (norm + 1e-6))
        return {name: gradient * share for name, gradient in gradients.items()}

    def _move_tensor(
        self,
        before: list[Array],
        gradient: Array,
        rate: Array,
        decay: Array,
        pace: Pace,
        numbers: Numbers,
        used: Array | None,
    ) -> list[Array]:
        """Return a weight, its velocity and its second moment after a step, which is `used`, or
        not. None: it is."""
        weight, velocity, *moments = before
        after: tuple[Array, ...]
        if self._recipe.optimizer in ("adamw", "lamb"):
            mean = velocity + numbers.share1 * (gradient - velocity)
            square = _approach_square(moments[0], gradient, numbers)
            root = jnp.sqrt(square) * pace.of_root + numbers.epsilon
            move = mean * pace.of_mean / root + decay * weight
            if self._recipe.optimizer == "lamb":
                move = move * jnp.where(decay > 0, _find_trust_ratio(weight, move), 1.0)
            after = (weight - rate * move, mean, square)
        elif self._recipe.optimizer == "rmsprop_tf":
            gradient = gradient + decay * weight
            square = _approach_square(moments[0], gradient, numbers)
            move = rate * gradient / jnp.sqrt(square + numbers.epsilon)
            moved = numbers.momentum * velocity + move
            after = (weight - moved, moved, square)
        else:
            gradient = gradient + decay * weight
            moved = numbers.momentum * velocity + gradient
            move = gradient + numbers.momentum * moved if self._recipe.nesterov else moved
            after = (weight - rate * move, moved)
        if used is None:
            return list(after)
        # Without a branch, for which a device would wait
        return [jnp.where(used, new, old) for new, old in zip(after, before, strict=True)]

    def _average(self, ema: Arrays, tensors: Arrays, pace: Pace) -> Arrays:
        """Return the moving averages after a step."""
        moved = {
            name: ema[name] + pace.share * (tensors[name] - ema[name]) for name in self._moving
        }
        return ema | moved


def clear_removed(values: Values, removed: Arrays) -> Values:
    """Return values that are 0 where masks remove weights."""

    def clear(arrays: Arrays) -> Arrays:
        return {
            name: jnp.where(removed[name], 0.0, array) if name in removed else array
            for name, array in arrays.items()
        }

    tensors, velocity, second_moments, ema = map(clear, values[:4])
    return Values(tensors, velocity, second_moments, ema, values.scale)


def _find_trust_ratio(weight: Array, move: Array) -> Array:
    """Return |weight| / |move|, or 1 if one of both is 0."""
    before, after = (jnp.sqrt(jnp.sum(jnp.square(value))) for value in (weight, move))
    has_ratio = (before > 0) & (after > 0)
    return jnp.where(has_ratio, before / jnp.where(has_ratio, after, 1.0), 1.0)


def _approach_square(square: Array, gradient: Array, numbers: Numbers) -> Array:
    """Return the mean of squared gradients after another gradient."""
    return square + numbers.share2 * (jnp.square(gradient) - square)
