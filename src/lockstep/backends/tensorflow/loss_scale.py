"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from typing import Any

import tensorflow as tf

from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe


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
