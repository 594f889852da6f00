"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.world import Array
from lockstep.backends.shared import formulas
from lockstep.backends.shared.formulas import Formula, Kept, Step
from lockstep.backends.shared.layout import Group, Layout
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.backends.shared.vector_state import VectorState
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections


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

    def apply(self, gradient: Array, step: int) -> None:
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
        self, formula: Formula, gradient: Array, used: Array | None, step: int
    ) -> None:
        """Take a step, unless `used`, float32 [1], is 0. Then the move and the shares of new
        gradients in means are 0, which changes nothing."""
        corrections = {name: float(table[step]) for name, table in self._corrections.items()}
        for group in self.layout.groups:
            rate = self._learning_rates[step] * group.factor
            own_step = _Step(self._recipe, rate, group.decay or None, corrections, used, group)
            weights, kept = self._find_parts(group)
            move = own_step.find_move(formula, weights, kept, gradient[group.place])
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


@dataclass(frozen=True)
class _Step(Step):
    group: Group

    def approach(self, mean: Array, value: Array, beta: str) -> Array:
        mean += _times(self.used, (1 - getattr(self.recipe, beta)) * (value - mean))
        return mean

    def stretch(self, weight: Array, move: Array) -> Array:
        for place in self.group.tensors:
            before = weight[place].norm()
            after = move[place].norm()
            has_ratio = (before > 0) * (after > 0)
            ratio = mx.nd.where(has_ratio, before / after, mx.nd.ones_like(before))
            move[place] = mx.nd.broadcast_mul(move[place], ratio)
        return move


def _rmsprop_tf(step: Step, kept: Kept, gradient: Array) -> Array:
    root = (kept.second_moment + step.recipe.optimizer_epsilon).sqrt()
    change = gradient / root * step.rate - (1 - step.recipe.momentum) * kept.velocity
    kept.velocity += _times(step.used, change)
    return kept.velocity


FORMULAS: dict[str, Formula | None] = {"sgd": None, **formulas.FORMULAS, "rmsprop_tf": _rmsprop_tf}
"""By the names in `OPTIMIZERS`. SGD is MXNet's own operation."""


class LossScale(LossScaleState):
    """The loss scale in MXNet's arrays."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        super().__init__(recipe)
        self._context = context
        self.fixed = 1.0 if self.is_dynamic else self._initial
        """The scale if it is not dynamic, else 1."""
        self.value = self._number(self._initial)
        self._good = self._number(0)
        self._bad = self._number(0)

    def _number(self, value: float) -> Array:
        return mx.nd.array([value], self._context, "float32")

    def step(self, gradient: Array) -> tuple[Array, Array]:
        """Adapt the scale; return the unscaled gradient and whether it is finite, 1 or 0.

        If a value of the gradient is not finite, zeros are returned instead.
        """
        finite = mx.nd.multi_all_finite(gradient, num_arrays=1)
        unscaled = mx.nd.broadcast_div(gradient, self.value)
        self._adapt(finite)
        return mx.nd.where(
            mx.nd.broadcast_like(finite, unscaled), unscaled, mx.nd.zeros_like(unscaled)
        ), finite

    def _adapt(self, finite: Array) -> None:
        good = finite * (self._good + 1)
        bad = (1 - finite) * (self._bad + 1)
        grows = good >= self._recipe.loss_scale_growth_steps
        shrinks = bad >= self._recipe.loss_scale_backoff_steps
        one = mx.nd.ones_like(finite)
        factor = mx.nd.where(grows, one * self._recipe.loss_scale_growth, one)
        factor = mx.nd.where(shrinks, one * self._recipe.loss_scale_backoff, factor)
        self.value = self.value * factor
        self._good = good * (1 - grows)
        self._bad = bad * (1 - shrinks)

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value.asscalar().item(), self._good.asscalar(), self._bad.asscalar()

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value = self._number(scale)
        self._good = self._number(good)
        self._bad = self._number(bad)
