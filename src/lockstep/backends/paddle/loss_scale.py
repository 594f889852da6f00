"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

import paddle

from lockstep.backends.paddle.world import Tensor
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe


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
