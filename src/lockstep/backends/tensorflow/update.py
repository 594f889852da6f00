"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends.shared import formulas
from lockstep.backends.shared.channels_last import canonical_shapes, convert_from_canonical
from lockstep.backends.shared.formulas import Formula, Kept, Step
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.backends.tensorflow.model import Tensor, new_variables
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import check_masks
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


class Update:
    """The optimizer of a run. It holds all of the state except the model's tensors."""

    def __init__(
        self, recipe: Recipe, values: Mapping[str, Tensor], learning_rates: np.ndarray
    ) -> None:
        """Take all tensors of the model, by canonical name."""
        self._recipe = recipe
        self._tensors = values
        table = list(recipe.list_tensors())
        self._decayed = {tensor.name for tensor in table if recipe.decays(tensor)}
        self._rate_factors = rate_factors(recipe)
        parameters = [tensor.name for tensor in table if tensor.is_trained]
        self.parameters = {name: values[name] for name in parameters}
        self.trained = {name: values[name] for name in self._rate_factors}
        """The parameters that have gradients."""
        self.velocity = _make_zeros(self.parameters)
        has_moments = OPTIMIZERS[recipe.optimizer].has_second_moments
        self.second_moments = _make_zeros(self.parameters) if has_moments else {}
        """Means of squared gradients by name; empty if the optimizer has none."""
        self.ema = new_variables(recipe) if recipe.ema_decay else {}
        """Moving averages by name; empty without `ema_decay`."""
        self._moving = changing_tensors(recipe) if recipe.ema_decay else []
        self._removed: dict[str, Tensor] = {}
        self.scale = LossScale(recipe)
        self._learning_rates = tf.constant(learning_rates, tf.float32)
        self._ema_decays = tf.constant(ema_decays(recipe, len(learning_rates)), tf.float32)
        self._corrections = {
            name: tf.constant(table, tf.float32)
            for name, table in find_corrections(recipe, len(learning_rates)).items()
        }

    def apply(self, gradients: list[Tensor], step: Tensor) -> None:
        """Update everything with the gradients of `trained` in a step."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        by_name = dict(zip(self.trained, gradients, strict=True))
        for name, removed in self._removed.items():
            if name in by_name:
                by_name[name] = tf.where(removed, 0.0, by_name[name])
        by_name, used = self.scale.step(by_name)
        if self._recipe.clip_norm:
            norm = tf.linalg.global_norm(list(by_name.values()))
            share = tf.minimum(1.0, self._recipe.clip_norm / (norm + 1e-6))
            by_name = {name: gradient * share for name, gradient in by_name.items()}
        formula = FORMULAS[self._recipe.optimizer]
        if formula is None:
            self._move_by_velocities(by_name, used, step)
        else:
            self._move_by_formula(formula, by_name, used, step)
        if self.ema:
            keep = tf.gather(self._ema_decays, step)
            for name in self._moving:
                average = self.ema[name]
                average.assign(average + (1 - keep) * (self._tensors[name] - average))

    def _move_by_velocities(self, gradients: dict[str, Tensor], used: Tensor, step: Tensor) -> None:
        """Take a step of SGD, unless it is not to be `used`."""
        # XLA would take a slice's index for a constant and compile every step.
        rate = tf.gather(self._learning_rates, step)
        # Without a branch, for which the host would wait for a GPU: a step with rate 0 and momentum
        # 1 changes nothing.
        rate = tf.where(used, rate, 0.0)
        momentum = tf.where(used, self._recipe.momentum, 1.0)
        decay = tf.where(used, self._recipe.weight_decay, 0.0)
        for name, gradient in gradients.items():
            weight = self.parameters[name]
            velocity = self.velocity[name]
            if name in self._decayed:
                gradient += decay * weight
            tf.raw_ops.ResourceApplyMomentum(
                var=weight.handle,
                accum=velocity.handle,
                lr=rate * self._rate_factors[name],
                grad=gradient,
                momentum=momentum,
                use_nesterov=self._recipe.nesterov,
            )

    def _move_by_formula(
        self, formula: Formula, gradients: dict[str, Tensor], used: Tensor, step: Tensor
    ) -> None:
        """Take a step, unless it is not to be `used`.

        Then the rate and the shares of new gradients in means are 0, which changes nothing.
        """
        rate = tf.where(used, tf.gather(self._learning_rates, step), 0.0)
        corrections = {name: tf.gather(table, step) for name, table in self._corrections.items()}
        for name, gradient in gradients.items():
            own_rate = rate * self._rate_factors[name]
            decay = self._recipe.weight_decay if name in self._decayed else None
            own_step = _Step(self._recipe, own_rate, decay, corrections, used)
            weight = self.parameters[name]
            kept = Kept(self.velocity[name], self.second_moments.get(name))
            weight.assign_sub(own_step.find_move(formula, weight, kept, gradient))

    def mask(self, masks: Mapping[str, np.ndarray]) -> bool:
        """Keep weights at 0 where a mask is False; return whether the step must be traced again.

        Raises `CheckpointError` if a mask does not fit.
        """
        check_masks(canonical_shapes(self.parameters), masks)
        if not masks and not self._removed:
            return False
        self._removed = {
            name: tf.constant(convert_from_canonical(~np.asarray(mask, bool)))
            for name, mask in masks.items()
        }
        self.apply_masks()
        return True

    def apply_masks(self) -> None:
        """Set what masks remove from weights, velocities and averages to 0."""
        for name, removed in self._removed.items():
            for variables in (self._tensors, self.velocity, self.second_moments, self.ema):
                if name in variables:
                    variables[name].assign(tf.where(removed, 0.0, variables[name]))


def _make_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tf.Variable(tf.zeros_like(t), trainable=False) for name, t in tensors.items()}


class _Step(Step):
    def find_root(self, kept: Kept) -> Tensor:
        root = tf.sqrt(kept.second_moment) * self.corrections["root"]
        return root + self.recipe.optimizer_epsilon

    def approach(self, mean: Tensor, value: Tensor, beta: str) -> Tensor:
        share = tf.where(self.used, 1 - getattr(self.recipe, beta), 0.0)
        moved = mean + share * (value - mean)
        mean.assign(moved)
        return moved

    def stretch(self, weight: Tensor, move: Tensor) -> Tensor:
        before = tf.norm(weight)
        after = tf.norm(move)
        has_ratio = (before > 0) & (after > 0)
        return move * tf.where(has_ratio, before / tf.where(has_ratio, after, 1.0), 1.0)


def _rmsprop_tf(step: Step, kept: Kept, gradient: Tensor) -> Tensor:
    change = step.rate * gradient / tf.sqrt(kept.second_moment + step.recipe.optimizer_epsilon)
    moved = tf.where(step.used, step.recipe.momentum, 1.0) * kept.velocity + change
    kept.velocity.assign(moved)
    return tf.where(step.used, moved, 0.0)


FORMULAS: dict[str, Formula | None] = {"sgd": None, **formulas.FORMULAS, "rmsprop_tf": _rmsprop_tf}
"""By the names in `OPTIMIZERS`. SGD is TensorFlow's own operation."""


class LossScale(LossScaleState):
    """The loss scale in TensorFlow's variables. Keras' `LossScaleOptimizer` backs off at the first
    overflow, while this one can wait for several in a row."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.value = tf.Variable(self._initial, dtype=tf.float32, trainable=False)
        self._good = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._bad = tf.Variable(0, dtype=tf.int64, trainable=False)

    def step(self, gradients: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the unscaled gradients and whether to use them, and adapt the scale.

        With dynamic scaling, gradients with a value that is not finite are replaced by zeros and
        not used.
        """
        if not self.is_used:
            return gradients, tf.constant(True)
        unscaled = {name: gradient / self.value for name, gradient in gradients.items()}
        if not self.is_dynamic:
            return unscaled, tf.constant(True)
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients.values()]
        )
        self._adapt(finite)
        return {
            name: tf.where(finite, gradient, 0.0) for name, gradient in unscaled.items()
        }, finite

    def _adapt(self, finite: Any) -> None:
        one = tf.constant(1, tf.int64)
        zero = tf.constant(0, tf.int64)
        good = tf.where(finite, self._good + one, zero)
        bad = tf.where(finite, zero, self._bad + one)
        grows = good >= self._recipe.loss_scale_growth_steps
        shrinks = bad >= self._recipe.loss_scale_backoff_steps
        factor = tf.where(grows, self._recipe.loss_scale_growth, 1.0)
        factor = tf.where(shrinks, self._recipe.loss_scale_backoff, factor)
        self.value.assign(self.value * factor)
        self._good.assign(tf.where(grows, zero, good))
        self._bad.assign(tf.where(shrinks, zero, bad))

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value.numpy().item(), self._good.numpy(), self._bad.numpy()

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value.assign(scale)
        self._good.assign(good)
        self._bad.assign(bad)
