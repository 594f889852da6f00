"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from typing import Any

import mxnet as mx

from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe

Array = Any
"""An `mx.nd.NDArray`: MXNet has no annotations."""


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
