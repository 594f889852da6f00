"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from dataclasses import dataclass

import numpy as np
import paddle

from lockstep.backends.paddle.world import Tensor
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
    def apply(self, gradient: Tensor, step: int) -> None:
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

    def _move_by_formula(self, formula: Formula, gradient: Tensor, used: Tensor, step: int) -> None:
        """Take a step, unless `used`, float32 [1], is 0. Then the rate and the shares of new
        gradients in means are 0, which changes nothing."""
        corrections = {name: float(table[step]) for name, table in self._corrections.items()}
        rate = float(self._learning_rates[step]) * used
        for group in self.layout.groups:
            own_rate = rate * group.factor
            decay = group.decay or None
            own_step = _Step(self._recipe, own_rate, decay, corrections, used, group, rate)
            weights, kept = self._find_parts(group)
            weights.subtract_(own_step.find_move(formula, weights, kept, gradient[group.place]))

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


@dataclass(frozen=True)
class _Step(Step):
    group: Group
    rate_of_all: Tensor
    """The learning rate without the group's factor."""

    def approach(self, mean: Tensor, value: Tensor, beta: str) -> Tensor:
        return mean.add_((1 - getattr(self.recipe, beta)) * self.used * (value - mean))

    def stretch(self, weight: Tensor, move: Tensor) -> Tensor:
        for place in self.group.tensors:
            before = paddle.linalg.norm(weight[place])
            after = paddle.linalg.norm(move[place])
            has_ratio = (before > 0) & (after > 0)
            move[place].multiply_(paddle.where(has_ratio, before / after, paddle.ones([])))
        return move


def _rmsprop_tf(step: _Step, kept: Kept, gradient: Tensor) -> Tensor:
    root = (kept.second_moment + step.recipe.optimizer_epsilon).sqrt()
    kept.velocity.multiply_(step.used * step.recipe.momentum + (1 - step.used))
    kept.velocity.add_(step.group.factor * (step.rate_of_all * gradient / root))
    return step.used * kept.velocity


FORMULAS: dict[str, Formula | None] = {"sgd": None, **formulas.FORMULAS, "rmsprop_tf": _rmsprop_tf}
"""By the names in `OPTIMIZERS`. SGD is Paddle's own operation."""


class LossScale(LossScaleState):
    """The loss scale in Paddle's tensors."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.value = paddle.to_tensor([self._initial], dtype="float32")
        self._good = paddle.zeros([1], dtype="int64")
        self._bad = paddle.zeros([1], dtype="int64")

    def step(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unscaled gradient and whether to use it, bool [1], and adapt the scale.

        With dynamic scaling a gradient with a value that is not finite is replaced by zeros and not
        used.
        """
        unscaled = gradient / self.value
        if not self.is_dynamic:
            return unscaled, paddle.ones([1], dtype="bool")
        finite = paddle.isfinite(gradient).all().reshape([1])
        self._adapt(finite)
        return paddle.where(finite, unscaled, paddle.zeros([1])), finite

    def _adapt(self, finite: Tensor) -> None:
        zero = paddle.zeros([1], dtype="int64")
        good = paddle.where(finite, self._good + 1, zero)
        bad = paddle.where(finite, zero, self._bad + 1)
        grows = good >= self._recipe.loss_scale_growth_steps
        shrinks = bad >= self._recipe.loss_scale_backoff_steps
        factor = paddle.where(
            grows, paddle.full([1], self._recipe.loss_scale_growth), paddle.ones([1])
        )
        factor = paddle.where(shrinks, paddle.full([1], self._recipe.loss_scale_backoff), factor)
        self.value = self.value * factor
        self._good = paddle.where(grows, zero, good)
        self._bad = paddle.where(shrinks, zero, bad)

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value.item(), self._good.item(), self._bad.item()

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value = paddle.to_tensor([scale], dtype="float32")
        self._good = paddle.to_tensor([good])
        self._bad = paddle.to_tensor([bad])
