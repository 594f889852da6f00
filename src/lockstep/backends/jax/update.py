"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax.model import Array, Arrays
from lockstep.backends.shared import formulas
from lockstep.backends.shared.formulas import Formula, Kept, Step
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


class Scale(NamedTuple):
    """The scale, float32, and the numbers of good and of bad steps in a row, int32."""

    value: Array
    good: Array
    bad: Array


class Adaptation(NamedTuple):
    """How a dynamic scale is adapted: the recipe's numbers."""

    growth: Array
    growth_steps: Array
    backoff: Array
    backoff_steps: Array


class LossScale(LossScaleState):
    """The rule of a loss scale, and where its state is read and written. A step gets the state and
    returns the next one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.adaptation = Adaptation(
            np.float32(recipe.loss_scale_growth),
            np.int32(recipe.loss_scale_growth_steps),
            np.float32(recipe.loss_scale_backoff),
            np.int32(recipe.loss_scale_backoff_steps),
        )
        self.state = Scale(np.float32(self._initial), np.int32(0), np.int32(0))

    def step(
        self, scale: Scale, gradients: Mapping[str, Array], adaptation: Adaptation
    ) -> tuple[Arrays, Array | None, Scale]:
        """Return the unscaled gradients, whether to use them, and the next state.

        With dynamic scaling, gradients with a value that is not finite are not to be used.
        Otherwise all are, which is None.
        """
        if not self.is_used:
            return dict(gradients), None, scale
        unscaled = {name: gradient / scale.value for name, gradient in gradients.items()}
        if not self.is_dynamic:
            return unscaled, None, scale
        finite = [jnp.all(jnp.isfinite(gradient)) for gradient in gradients.values()]
        is_finite = jnp.all(jnp.stack(finite))
        return unscaled, is_finite, _adapt(scale, is_finite, adaptation)

    def _read_numbers(self) -> tuple[float, float, float]:
        value, good, bad = (np.asarray(number).item() for number in self.state)
        return value, good, bad

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.state = Scale(np.float32(scale), np.int32(good), np.int32(bad))


def _adapt(scale: Scale, finite: Array, adaptation: Adaptation) -> Scale:
    good = jnp.where(finite, scale.good + 1, 0)
    bad = jnp.where(finite, 0, scale.bad + 1)
    grows = good >= adaptation.growth_steps
    shrinks = bad >= adaptation.backoff_steps
    factor = jnp.where(grows, adaptation.growth, 1.0)
    factor = jnp.where(shrinks, adaptation.backoff, factor)
    return Scale(scale.value * factor, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad))


class Values(NamedTuple):
    """Everything that a step changes, on the device, by canonical names."""

    tensors: Arrays
    velocity: Arrays
    second_moments: Arrays
    """Means of squared gradients; empty if the optimizer has none."""
    ema: Arrays
    """Moving averages; empty without `ema_decay`."""
    scale: Scale


class Pace(NamedTuple):
    """What is different in every step: float32 numbers, or as a table, arrays [steps]."""

    rate: Array
    share: Array
    """That of the new values in moving averages."""
    corrections: Arrays
    """Those of the optimizer (`lockstep.recipes.schedule.find_corrections`), by name."""


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
    corrections = find_corrections(recipe, steps).items()
    return Pace(
        learning_rates.astype(np.float32),
        shares.astype(np.float32),
        {name: table.astype(np.float32) for name, table in corrections},
    )


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

    def apply(
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
            own = pace._replace(rate=pace.rate * numbers.factors[i])
            after = self._move(before, gradients[name], numbers.decays[i], own, numbers, used)
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
        decay: Array,
        pace: Pace,
        numbers: Numbers,
        used: Array | None,
    ) -> list[Array]:
        """Return a weight, its velocity and its second moment after a step, which is `used`, or
        not. None: it is."""
        weight, *kept_before = before
        kept = Kept(*kept_before)
        step = _Step(self._recipe, pace.rate, decay, pace.corrections, used, numbers)
        move = step.find_move(FORMULAS[self._recipe.optimizer], weight, kept, gradient)
        after = [weight - move, kept.velocity, kept.second_moment][: len(before)]
        if used is None:
            return after
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


@dataclass(frozen=True)
class _Step(Step):
    numbers: Numbers

    def find_root(self, kept: Kept) -> Array:
        root = jnp.sqrt(kept.second_moment) * self.corrections["root"]
        return root + self.numbers.epsilon

    def approach(self, mean: Array, value: Array, beta: str) -> Array:
        share = self.numbers.share1 if beta == "beta1" else self.numbers.share2
        return mean + share * (value - mean)

    def stretch(self, weight: Array, move: Array) -> Array:
        before, after = (jnp.sqrt(jnp.sum(jnp.square(value))) for value in (weight, move))
        has_ratio = (before > 0) & (after > 0)
        ratio = jnp.where(has_ratio, before / jnp.where(has_ratio, after, 1.0), 1.0)
        return move * jnp.where(self.decay > 0, ratio, 1.0)


def _sgd(step: _Step, kept: Kept, gradient: Array) -> Array:
    momentum = step.numbers.momentum
    kept.velocity = momentum * kept.velocity + gradient
    return gradient + momentum * kept.velocity if step.recipe.nesterov else kept.velocity


def _rmsprop_tf(step: _Step, kept: Kept, gradient: Array) -> Array:
    change = step.rate * gradient / jnp.sqrt(kept.second_moment + step.numbers.epsilon)
    kept.velocity = step.numbers.momentum * kept.velocity + change
    return kept.velocity


FORMULAS: dict[str, Formula] = {"sgd": _sgd, **formulas.FORMULAS, "rmsprop_tf": _rmsprop_tf}
"""By the names in `OPTIMIZERS`."""
