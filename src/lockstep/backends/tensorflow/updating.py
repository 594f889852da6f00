"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lockstep.backends.tensorflow.loss_scale import LossScale
from lockstep.backends.tensorflow.model import (
    Tensor,
    canonical_shapes,
    convert_from_canonical,
    new_variables,
)
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import check_masks
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


class Kept(NamedTuple):
    """What the optimizer keeps for a tensor: variables."""

    velocity: Tensor
    second_moment: Tensor | None


class Pace(NamedTuple):
    """What a step does to all values of a tensor alike."""

    recipe: Recipe
    used: Tensor
    """Whether the step is taken: no overflow skips it."""
    rate: Tensor
    """The tensor's learning rate; 0 if the step is skipped."""
    corrections: Mapping[str, Tensor]
    """Those of the step (`lockstep.recipes.schedule.find_corrections`)."""


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
        self.velocity = {
            name: tf.Variable(tf.zeros_like(p), trainable=False)
            for name, p in self.parameters.items()
        }
        self.second_moments = (
            {
                name: tf.Variable(tf.zeros_like(p), trainable=False)
                for name, p in self.parameters.items()
            }
            if OPTIMIZERS[recipe.optimizer].has_second_moments
            else {}
        )
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

    def take(self, gradients: list[Tensor], step: Tensor) -> None:
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
        self, formula: "Formula", gradients: dict[str, Tensor], used: Tensor, step: Tensor
    ) -> None:
        """Take a step, unless it is not to be `used`.

        Then the rate and the shares of new gradients in means are 0, which changes nothing.
        """
        optimizer = OPTIMIZERS[self._recipe.optimizer]
        rate = tf.where(used, tf.gather(self._learning_rates, step), 0.0)
        corrections = {name: tf.gather(table, step) for name, table in self._corrections.items()}
        for name, gradient in gradients.items():
            weight = self.parameters[name]
            decay = self._recipe.weight_decay if name in self._decayed else 0.0
            own_rate = rate * self._rate_factors[name]
            if optimizer.decays == "gradient":
                gradient += decay * weight
            kept = Kept(self.velocity[name], self.second_moments.get(name))
            move = formula(Pace(self._recipe, used, own_rate, corrections), kept, gradient)
            if optimizer.decays == "move":
                move += decay * weight
            if decay and optimizer.has_trust_ratio:
                move *= _find_trust_ratio(weight, move)
            if optimizer.velocity != "move":
                move = own_rate * move
            weight.assign_sub(move)

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


def _find_trust_ratio(weight: Tensor, move: Tensor) -> Tensor:
    """Return |weight| / |move|, or 1 if one of both is 0."""
    before = tf.norm(weight)
    after = tf.norm(move)
    has_ratio = (before > 0) & (after > 0)
    return tf.where(has_ratio, before / tf.where(has_ratio, after, 1.0), 1.0)


def _adamw(pace: Pace, kept: Kept, gradient: Tensor) -> Tensor:
    mean, root = _average(pace, kept, gradient)
    return mean * pace.corrections["mean"] / root


def _nadam(pace: Pace, kept: Kept, gradient: Tensor) -> Tensor:
    mean, root = _average(pace, kept, gradient)
    ahead = mean * pace.corrections["nesterov_mean"]
    return (ahead + gradient * pace.corrections["nesterov_gradient"]) / root


def _rmsprop_tf(pace: Pace, kept: Kept, gradient: Tensor) -> Tensor:
    square = _average_square(pace, kept, gradient)
    change = pace.rate * gradient / tf.sqrt(square + pace.recipe.optimizer_epsilon)
    moved = tf.where(pace.used, pace.recipe.momentum, 1.0) * kept.velocity + change
    kept.velocity.assign(moved)
    return tf.where(pace.used, moved, 0.0)


Formula = Callable[[Pace, Kept, Tensor], Tensor]
FORMULAS: dict[str, Formula | None] = {
    "sgd": None,  # TensorFlow's own operation
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`. A formula updates what the optimizer keeps and returns how a weight
moves, without the learning rate unless velocities have it."""


def _average(pace: Pace, kept: Kept, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Update the means of gradients and of their squares; return the former, and the corrected root
    of the latter, increased by epsilon."""
    mean = _approach(pace, kept.velocity, gradient, pace.recipe.beta1)
    square = _average_square(pace, kept, gradient)
    return mean, tf.sqrt(square) * pace.corrections["root"] + pace.recipe.optimizer_epsilon


def _average_square(pace: Pace, kept: Kept, gradient: Tensor) -> Tensor:
    return _approach(pace, kept.second_moment, tf.square(gradient), pace.recipe.beta2)


def _approach(pace: Pace, mean: Tensor, value: Tensor, beta: float) -> Tensor:
    """Give a new value the share 1 - beta in a mean, and return the mean."""
    moved = mean + tf.where(pace.used, 1 - beta, 0.0) * (value - mean)
    mean.assign(moved)
    return moved
