"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import paddle

from lockstep.backends.paddle.loss_scale import LossScale
from lockstep.backends.paddle.world import Tensor
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections


class Values(NamedTuple):
    """Weights with the same rate and decay, and what the optimizer keeps for them: views."""

    weights: Tensor
    velocity: Tensor
    second_moments: Tensor | None


class Pace(NamedTuple):
    """What a step does to all values of a group alike."""

    recipe: Recipe
    used: Tensor
    """float32 [1]: 0 if an overflow skips the step, else 1."""
    rate: Tensor
    """float32 [1]: the learning rate; 0 if the step is skipped."""
    factor: float
    """The group's factor of the learning rate."""
    corrections: Mapping[str, float]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""


class Update(VectorState):
    """The optimizer of a run. It holds all of the state, in vectors."""

    def __init__(self, recipe: Recipe, layout: Layout, learning_rates: np.ndarray) -> None:
        self._recipe = recipe
        self.layout = layout
        self.values = paddle.zeros([layout.size])
        self.velocity = paddle.zeros([layout.count])
        has_moments = OPTIMIZERS[recipe.optimizer].has_second_moments
        self.second_moments = paddle.zeros([layout.count]) if has_moments else None
        self.ema = paddle.zeros([layout.size]) if recipe.ema_decay else None
        self.scale = LossScale(recipe)
        self._learning_rates = np.asarray(learning_rates, np.float32)
        self._corrections = find_corrections(recipe, len(learning_rates))
        self._ema_decays = ema_decays(recipe, len(learning_rates)).astype(np.float32)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def take(self, gradient: Tensor, step: int) -> None:
        """Update everything with the gradient of the trained parameters in a step."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        trained = self.layout.trained_place
        if self._removed is not None:
            gradient = paddle.where(self._removed[trained], paddle.zeros([1]), gradient)
        gradient, used = self.scale.step(gradient)
        if self._recipe.clip_norm:
            share = self._recipe.clip_norm / (paddle.linalg.norm(gradient) + 1e-6)
            gradient = gradient * share.clip(max=1.0)
        formula = FORMULAS[self._recipe.optimizer]
        if formula is None:
            self._move_by_velocities(gradient, used, step)
        else:
            self._move_by_formula(formula, gradient, used.cast("float32"), step)
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            changed = self.values[self.layout.changing_place]
            average.add_(float(1 - keep) * (changed - average))
        self.done = step + 1

    def _move_by_velocities(self, gradient: Tensor, used: Tensor, step: int) -> None:
        """Take a step of SGD, unless it is not to be `used`."""
        trained = self.layout.trained_place
        rate = float(self._learning_rates[step])
        weights = self.values[trained]
        velocity = self.velocity[trained]
        before = velocity.clone() if self.scale.is_dynamic else None
        for group in self.layout.groups:
            own_rate = paddle.full([1], rate * group.factor)
            if self.scale.is_dynamic:  # rate 0 leaves the weights unchanged
                own_rate = paddle.where(used, own_rate, paddle.zeros([1]))
            paddle._C_ops.momentum_(
                weights[group.place],
                gradient[group.place],
                velocity[group.place],
                own_rate,
                None,
                self._recipe.momentum,
                self._recipe.nesterov,
                "l2_decay" if group.decay else "",
                group.decay,
                False,
                1.0,
            )
        if before is not None:
            velocity.copy_(paddle.where(used, velocity, before), True)

    def _move_by_formula(
        self, formula: "Formula", gradient: Tensor, used: Tensor, step: int
    ) -> None:
        """Take a step, unless `used`, float32 [1], is 0. Then the rate and the shares of new
        gradients in means are 0, which changes nothing."""
        optimizer = OPTIMIZERS[self._recipe.optimizer]
        trained = self.layout.trained_place
        corrections = {name: float(table[step]) for name, table in self._corrections.items()}
        rate = float(self._learning_rates[step]) * used
        for group in self.layout.groups:
            kept = (self.values, self.velocity, self.second_moments)
            parts = [None if vector is None else vector[trained][group.place] for vector in kept]
            values = Values(*parts)
            own = gradient[group.place]
            if group.decay and optimizer.decays == "gradient":
                own = own + group.decay * values.weights
            move = formula(Pace(self._recipe, used, rate, group.factor, corrections), values, own)
            if group.decay and optimizer.decays == "move":
                move.add_(group.decay * values.weights)
            if group.decay and optimizer.has_trust_ratio:
                for place in group.tensors:
                    move[place].multiply_(_find_trust_ratio(values.weights[place], move[place]))
            if optimizer.velocity != "move":
                move = rate * group.factor * move
            values.weights.subtract_(move)

    def _copy_to_array(self, vector: Tensor) -> np.ndarray:
        return vector.numpy()

    def _fill(self, vector: Tensor, values: np.ndarray) -> None:
        vector.copy_(paddle.to_tensor(values), True)

    def _load_removed(self, removed: np.ndarray) -> Tensor:
        return paddle.to_tensor(removed)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _clear_removed(self, vector: Tensor, removed: Tensor) -> None:
        kept = vector[: self.layout.count]
        kept.copy_(paddle.where(removed, paddle.zeros([1]), kept), True)


def _find_trust_ratio(weight: Tensor, move: Tensor) -> Tensor:
    """Return |weight| / |move|, or 1 if one of both is 0."""
    before = paddle.linalg.norm(weight)
    after = paddle.linalg.norm(move)
    return paddle.where((before > 0) & (after > 0), before / after, paddle.ones([]))


def _adamw(pace: Pace, values: Values, gradient: Tensor) -> Tensor:
    roots = _average(pace, values, gradient)
    return pace.corrections["mean"] * values.velocity / roots


def _nadam(pace: Pace, values: Values, gradient: Tensor) -> Tensor:
    roots = _average(pace, values, gradient)
    ahead = pace.corrections["nesterov_mean"] * values.velocity
    return (ahead + pace.corrections["nesterov_gradient"] * gradient) / roots


def _rmsprop_tf(pace: Pace, values: Values, gradient: Tensor) -> Tensor:
    roots = (_average_squares(pace, values, gradient) + pace.recipe.optimizer_epsilon).sqrt()
    values.velocity.multiply_(pace.used * pace.recipe.momentum + (1 - pace.used))
    values.velocity.add_(pace.factor * (pace.rate * gradient / roots))
    return pace.used * values.velocity


Formula = Callable[[Pace, Values, Tensor], Tensor]
FORMULAS: dict[str, Formula | None] = {
    "sgd": None,  # Paddle's own operation
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`. A formula updates what the optimizer keeps and returns how weights
move, in a new vector, without the learning rate unless velocities have it."""


def _average(pace: Pace, values: Values, gradient: Tensor) -> Tensor:
    """Update the means of gradients and of their squares; return the corrected roots of these,
    increased by epsilon."""
    share = (1 - pace.recipe.beta1) * pace.used
    values.velocity.add_(share * (gradient - values.velocity))
    roots = _average_squares(pace, values, gradient).sqrt()
    return pace.corrections["root"] * roots + pace.recipe.optimizer_epsilon


def _average_squares(pace: Pace, values: Values, gradient: Tensor) -> Tensor:
    squares = values.second_moments
    assert squares is not None
    return squares.add_((1 - pace.recipe.beta2) * pace.used * (gradient.square() - squares))
