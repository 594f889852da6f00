"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from typing import Any

import mxnet as mx

from lockstep.recipes import Recipe

Array = Any
"""An `mx.nd.NDArray`: MXNet has no annotations."""


class LossScale:
    """The loss scale, constant or adapted to overflows by the recipe's rule. MXNet's own scaler
    waits for every step."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe = recipe
        self._context = context
        used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self.is_dynamic = used and recipe.loss_scaling == "dynamic"
        self.fixed = recipe.loss_scale if used and not self.is_dynamic else 1.0
        """The scale if it is not dynamic, else 1."""
        self.value = self._number(recipe.loss_scale if used else 1.0)
        self._good, self._bad = self._number(0), self._number(0)

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

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self.is_dynamic:
            return {}
        good, bad = (int(count.asscalar()) for count in (self._good, self._bad))
        return {"scale": float(self.value.asscalar()), "good_steps": good, "bad_steps": bad}

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self.is_dynamic:
            state = state or {"scale": self._recipe.loss_scale, "good_steps": 0, "bad_steps": 0}
            self.value, self._good, self._bad = (
                self._number(state[name]) for name in ("scale", "good_steps", "bad_steps")
            )
