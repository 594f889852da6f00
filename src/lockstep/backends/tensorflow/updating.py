"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from lockstep.backends.tensorflow.loss_scale import LossScale
from lockstep.backends.tensorflow.model import (
    Tensor,
    canonical_shapes,
    convert_from_canonical,
    new_variables,
)
from lockstep.models.architectures import model_spec, tensors
from lockstep.models.state import check_masks
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


class Update:
    """The optimizer of a run. It holds all of the state except the model's tensors."""

    def __init__(
        self, recipe: Recipe, values: Mapping[str, Tensor], learning_rates: np.ndarray
    ) -> None:
        """Take all tensors of the model, by canonical name."""
        self._recipe = recipe
        self._tensors = values
        table = list(tensors(model_spec(recipe.model), recipe.logits))
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
        self.ema = new_variables(recipe) if recipe.ema_decay else {}
        """Moving averages by name; empty without `ema_decay`."""
        self._moving = changing_tensors(recipe) if recipe.ema_decay else []
        self._removed: dict[str, Tensor] = {}
        self.scale = LossScale(recipe)
        self._learning_rates = tf.constant(learning_rates, tf.float32)
        self._ema_decays = tf.constant(ema_decays(recipe, len(learning_rates)), tf.float32)

    def take(self, gradients: list[Tensor], step: Tensor) -> None:
        """Update everything with the gradients of `trained` in a step."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        by_name = dict(zip(self.trained, gradients, strict=True))
        for name, removed in self._removed.items():
            if name in by_name:
                by_name[name] = tf.where(removed, 0.0, by_name[name])
        by_name, used = self.scale.step(by_name)
        # XLA would take a slice's index for a constant and compile every step.
        rate = tf.gather(self._learning_rates, step)
        # Without a branch, for which the host would wait for a GPU: a step with rate 0 and momentum
        # 1 changes nothing.
        rate = tf.where(used, rate, 0.0)
        momentum = tf.where(used, self._recipe.momentum, 1.0)
        decay = tf.where(used, self._recipe.weight_decay, 0.0)
        for name, gradient in by_name.items():
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
        if self.ema:
            keep = tf.gather(self._ema_decays, step)
            for name in self._moving:
                average = self.ema[name]
                average.assign(average + (1 - keep) * (self._tensors[name] - average))

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
            for variables in (self._tensors, self.velocity, self.ema):
                if name in variables:
                    variables[name].assign(tf.where(removed, 0.0, variables[name]))
