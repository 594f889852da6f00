"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.loss_scale import Array, LossScale
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections


class Values(NamedTuple):
    """Weights with the same rate and decay, and what the optimizer keeps for them: views."""

    weights: Array
    velocity: Array
    second_moments: Array | None


class Pace(NamedTuple):
    """What a step does to all values of a group alike."""

    recipe: Recipe
    used: Array | None
    """float32 [1]: 0 if an overflow skips the step, else 1; None: it is not skipped."""
    rate: float
    """The group's learning rate."""
    corrections: Mapping[str, float]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""


class Update(VectorState):
    """The optimizer of a run. It holds all of the state, in vectors."""

    def __init__(
        self, recipe: Recipe, layout: Layout, learning_rates: np.ndarray, context: Any
    ) -> None:
        self._recipe = recipe
        self._context = context
        self.layout = layout
        self.values = mx.nd.zeros(layout.size, context)
        self.velocity = mx.nd.zeros(layout.count, context)
        has_moments = OPTIMIZERS[recipe.optimizer].has_second_moments
        self.second_moments = mx.nd.zeros(layout.count, context) if has_moments else None
        self.ema = mx.nd.zeros(layout.size, context) if recipe.ema_decay else None
        self.scale = LossScale(recipe, context)
        self._learning_rates = [float(rate) for rate in learning_rates]
        self._corrections = find_corrections(recipe, len(learning_rates))
        self._ema_decays = ema_decays(recipe, len(learning_rates)).astype(np.float32)

    def take(self, gradient: Array, step: int) -> None:
        """Update everything with the gradient of the trained parameters in a step, which it may
        overwrite."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        if self._removed is not None:
            removed = self._removed[self.layout.trained_place]
            gradient = mx.nd.where(removed, mx.nd.zeros_like(gradient), gradient)
        used = None
        if self.scale.is_dynamic:
            gradient, used = self.scale.step(gradient)
        if self._recipe.clip_norm:
            norm = gradient.norm() / self.scale.fixed
            share = mx.nd.minimum(self._recipe.clip_norm / (norm + 1e-6), 1)
            gradient = mx.nd.broadcast_mul(gradient, share)
        formula = FORMULAS[self._recipe.optimizer]
        if formula is None:
            self._move_by_velocities(gradient, used, step)
        else:
            self._move_by_formula(formula, gradient / self.scale.fixed, used, step)
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            average += float(1 - keep) * (self.values[self.layout.changing_place] - average)
        self.done = step + 1

    def _move_by_velocities(self, gradient: Array, used: Array | None, step: int) -> None:
        """Take a step of SGD, unless `used`, float32 [1], is 0. It overwrites the gradient."""
        rate = self._learning_rates[step]
        scale = 1 / self.scale.fixed
        trained = self.layout.trained_place
        velocity = self.velocity[trained]
        weights = self.values[trained]
        before = velocity.copy() if self.scale.is_dynamic or self._recipe.nesterov else None
        # MXNet's operator has the learning rate inside the velocity. At rate -1 its velocity is the
        # canonical one. Its new weights are not used and overwrite the gradient.
        for group in self.layout.groups:
            mx.nd.sgd_mom_update(
                weights[group.place],
                gradient[group.place],
                velocity[group.place],
                lr=-1.0,
                momentum=self._recipe.momentum,
                wd=group.decay,
                rescale_grad=scale,
                out=gradient[group.place],
            )
        move = velocity
        momentum = self._recipe.momentum
        # It moves by g + m * v, where g = v - m * (the velocity before).
        if self._recipe.nesterov and before is not None:
            move = (1 + momentum) * velocity - momentum * before
        old = weights.copy() if used is not None else None
        for group in self.layout.groups:
            own = weights[group.place]
            mx.nd.sgd_update(own, move[group.place], lr=rate * group.factor, wd=0.0, out=own)
        if used is not None and before is not None:
            is_used = mx.nd.broadcast_like(used, before)
            weights[:] = mx.nd.where(is_used, weights, old)
            velocity[:] = mx.nd.where(is_used, velocity, before)

    def _move_by_formula(
        self, formula: "Formula", gradient: Array, used: Array | None, step: int
    ) -> None:
        """Take a step, unless `used`, float32 [1], is 0. Then the rate and the shares of new
        gradients in means are 0, which changes nothing."""
        optimizer = OPTIMIZERS[self._recipe.optimizer]
        trained = self.layout.trained_place
        corrections = {name: float(table[step]) for name, table in self._corrections.items()}
        for group in self.layout.groups:
            kept = (self.values, self.velocity, self.second_moments)
            parts = [None if vector is None else vector[trained][group.place] for vector in kept]
            values = Values(*parts)
            own = gradient[group.place]
            if group.decay and optimizer.decays == "gradient":
                own = own + group.decay * values.weights
            rate = self._learning_rates[step] * group.factor
            move = formula(Pace(self._recipe, used, rate, corrections), values, own)
            if group.decay and optimizer.decays == "move":
                move += group.decay * values.weights
            if group.decay and optimizer.has_trust_ratio:
                for place in group.tensors:
                    ratio = _find_trust_ratio(values.weights[place], move[place])
                    move[place] = mx.nd.broadcast_mul(move[place], ratio)
            if optimizer.velocity != "move":
                move = rate * move
            weights = values.weights
            weights -= _times(used, move)

    def _copy_to_array(self, vector: Array) -> np.ndarray:
        return vector.asnumpy()

    def _fill(self, vector: Array, values: np.ndarray) -> None:
        vector[:] = values

    def _load_removed(self, removed: np.ndarray) -> Array:
        return mx.nd.array(removed, self._context, np.float32)

    def _clear_removed(self, vector: Array, removed: Array) -> None:
        kept = vector[: self.layout.count]
        kept[:] = mx.nd.where(removed, mx.nd.zeros_like(kept), kept)


def _times(used: Array | None, change: Array) -> Array:
    """Return a change, or zeros if it is not to be used."""
    return change if used is None else mx.nd.broadcast_mul(change, used)


def _find_trust_ratio(weight: Array, move: Array) -> Array:
    """Return |weight| / |move|, or 1 if one of both is 0: float32 [1]."""
    before = weight.norm()
    after = move.norm()
    return mx.nd.where((before > 0) * (after > 0), before / after, mx.nd.ones_like(before))


def _adamw(pace: Pace, values: Values, gradient: Array) -> Array:
    roots = _average(pace, values, gradient)
    return pace.corrections["mean"] * values.velocity / roots


def _nadam(pace: Pace, values: Values, gradient: Array) -> Array:
    roots = _average(pace, values, gradient)
    ahead = pace.corrections["nesterov_mean"] * values.velocity
    return (ahead + pace.corrections["nesterov_gradient"] * gradient) / roots


def _rmsprop_tf(pace: Pace, values: Values, gradient: Array) -> Array:
    roots = (_average_squares(pace, values, gradient) + pace.recipe.optimizer_epsilon).sqrt()
    change = gradient / roots * pace.rate - (1 - pace.recipe.momentum) * values.velocity
    velocity = values.velocity
    velocity += _times(pace.used, change)
    return velocity


Formula = Callable[[Pace, Values, Array], Array]
FORMULAS: dict[str, Formula | None] = {
    "sgd": None,  # MXNet's own operation
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`. A formula updates what the optimizer keeps and returns how weights
move, without the learning rate unless velocities have it. If the step is skipped, the move is not
used."""


def _average(pace: Pace, values: Values, gradient: Array) -> Array:
    """Update the means of gradients and of their squares; return the corrected roots of these,
    increased by epsilon."""
    velocity = values.velocity
    velocity += _times(pace.used, (1 - pace.recipe.beta1) * (gradient - velocity))
    roots = _average_squares(pace, values, gradient).sqrt()
    return pace.corrections["root"] * roots + pace.recipe.optimizer_epsilon


def _average_squares(pace: Pace, values: Values, gradient: Array) -> Array:
    squares = values.second_moments
    squares += _times(pace.used, (1 - pace.recipe.beta2) * (gradient.square() - squares))
    return squares
