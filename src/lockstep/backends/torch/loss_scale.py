"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe


class LossScale(LossScaleState):
    """The loss scale in tensors that keep their memory, which a captured step reads and writes.

    Unlike `torch.amp.GradScaler`, it can wait for several overflows in a row before it backs off.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe)
        self.value = torch.tensor(self._initial, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._bad = torch.zeros((), dtype=torch.int64, device=device)
        self.never = torch.zeros((), device=device)
        """What `update` gets where gradients are not searched for overflows."""

    def step(
        self,
        gradients: list[Tensor],
        update: Callable[[Tensor | None, Tensor | None], None],
        find_overflow: Callable[[], Tensor] | None = None,
    ) -> None:
        """Call `update` with the divisor of gradients, and with 1.0 if a gradient is not finite,
        else 0.0.

        Both stay on the device. They are None if no scale is used. `update` must leave the weights
        unchanged on overflow. `find_overflow` returns the second one instead of PyTorch's own
        search.
        """
        if not self.is_used:
            update(None, None)
            return
        overflow = self.never
        if self.is_dynamic:
            overflow = find_overflow() if find_overflow is not None else self._overflow(gradients)
        update(self.value, overflow)
        if self.is_dynamic:
            self._adapt(overflow > 0)

    def _overflow(self, gradients: list[Tensor]) -> Tensor:
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
        return (~torch.isfinite(largest)).float()

    def _adapt(self, overflow: Tensor) -> None:
        good = torch.where(overflow, 0, self._good + 1)
        bad = torch.where(overflow, self._bad + 1, 0)
        grows = good >= self._recipe.loss_scale_growth_steps
        shrinks = bad >= self._recipe.loss_scale_backoff_steps
        factor = torch.where(grows, self._recipe.loss_scale_growth, 1.0)
        factor = torch.where(shrinks, self._recipe.loss_scale_backoff, factor)
        self.value.mul_(factor)
        self._good.copy_(torch.where(grows, 0, good))
        self._bad.copy_(torch.where(shrinks, 0, bad))

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value.item(), self._good.item(), self._bad.item()

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value.fill_(scale)
        self._good.fill_(good)
        self._bad.fill_(bad)
