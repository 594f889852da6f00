"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from typing import Any

import tensorflow as tf

from lockstep.recipes import Recipe


class LossScale:
    """The loss scale, constant or adapted to overflows.

    Keras' `LossScaleOptimizer` backs off at the first overflow. This class can wait for several
    consecutive overflows, like Paddle's, and its state is the canonical one of every engine.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self._dynamic = self._used and recipe.loss_scaling == "dynamic"
        self.value = tf.Variable(
            recipe.loss_scale if self._used else 1.0, dtype=tf.float32, trainable=False
        )
        self._good = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._bad = tf.Variable(0, dtype=tf.int64, trainable=False)

    def step(self, gradients: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the unscaled gradients and whether to use them, and adapt the scale.

        With dynamic scaling, gradients with a value that is not finite are replaced by zeros and
        not used.
        """
        if not self._used:
            return gradients, tf.constant(True)
        unscaled = {name: gradient / self.value for name, gradient in gradients.items()}
        if not self._dynamic:
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

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self._dynamic:
            return {}
        values = {"scale": self.value, "good_steps": self._good, "bad_steps": self._bad}
        return {name: value.numpy().item() for name, value in values.items()}

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self._dynamic:
            state = state or {"scale": self._recipe.loss_scale, "good_steps": 0, "bad_steps": 0}
            self.value.assign(state["scale"])
            self._good.assign(int(state["good_steps"]))
            self._bad.assign(int(state["bad_steps"]))
