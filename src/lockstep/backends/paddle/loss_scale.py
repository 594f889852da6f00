"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

import paddle

from lockstep.backends.paddle.world import Tensor
from lockstep.recipes import Recipe


class LossScale:
    """The loss scale, constant or adapted to overflows by the rules of Paddle's `GradScaler`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self.is_dynamic = used and recipe.loss_scaling == "dynamic"
        self.value = paddle.to_tensor([recipe.loss_scale if used else 1.0], dtype="float32")
        self._good, self._bad = (paddle.zeros([1], dtype="int64") for _ in range(2))

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

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self.is_dynamic:
            return {}
        values = {"scale": self.value, "good_steps": self._good, "bad_steps": self._bad}
        return {name: value.item() for name, value in values.items()}

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self.is_dynamic:
            state = state or {"scale": self._recipe.loss_scale, "good_steps": 0, "bad_steps": 0}
            self.value = paddle.to_tensor([state["scale"]], dtype="float32")
            self._good, self._bad = (
                paddle.to_tensor([int(state[name])]) for name in ("good_steps", "bad_steps")
            )
