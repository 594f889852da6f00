"""Loss scaling on the device: no step waits to learn whether it overflowed."""

from typing import Any

import mxnet as mx

from lockstep.recipes import Recipe

Array = Any
"""An `mx.nd.NDArray`: MXNet has no annotations."""


class LossScale:
    """The scale of the loss, constant or adapted to overflows by the recipe's rule. MXNet's own waits for every step."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe, self._context = recipe, context
        used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self.is_dynamic = used and recipe.loss_scaling == "dynamic"
        self.fixed = recipe.loss_scale if used and not self.is_dynamic else 1.0
        """What a scale that is not dynamic is."""
        self.value = self._number(recipe.loss_scale if used else 1.0)
        self._good, self._bad = self._number(0), self._number(0)

    def _number(self, value: float) -> Array:
        return mx.nd.array([value], self._context, "float32")

    def step(self, gradient: Array) -> tuple[Array, Array]:
        """Return the unscaled gradient, zeros if any of it is not finite, and whether all is: 1 or 0; adapt the scale."""
        finite = mx.nd.multi_all_finite(gradient, num_arrays=1)
        unscaled = mx.nd.broadcast_div(gradient, self.value)
        self._adapt(finite)
        return mx.nd.where(mx.nd.broadcast_like(finite, unscaled), unscaled, mx.nd.zeros_like(unscaled)), finite

    def _adapt(self, finite: Array) -> None:
        good, bad = finite * (self._good + 1), (1 - finite) * (self._bad + 1)
        grows = good >= self._recipe.loss_scale_growth_steps
        shrinks = bad >= self._recipe.loss_scale_backoff_steps
        one = mx.nd.ones_like(finite)
        factor = mx.nd.where(grows, one * self._recipe.loss_scale_growth, one)
        factor = mx.nd.where(shrinks, one * self._recipe.loss_scale_backoff, factor)
        self.value = self.value * factor
        self._good, self._bad = good * (1 - grows), bad * (1 - shrinks)

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self.is_dynamic:
            return {}
        good, bad = (int(count.asscalar()) for count in (self._good, self._bad))
        return {"scale": float(self.value.asscalar()), "good_steps": good, "bad_steps": bad}

    def write(self, state: dict[str, float]) -> None:
        """Take over a state; an empty one is the recipe's first."""
        if self.is_dynamic:
            state = state or {"scale": self._recipe.loss_scale, "good_steps": 0, "bad_steps": 0}
            self.value, self._good, self._bad = (self._number(state[name]) for name in ("scale", "good_steps", "bad_steps"))
