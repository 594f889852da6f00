"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.recipes import Recipe


class LossScale:
    """The loss scale, constant or adapted to overflows.

    All tensors keep their memory, which a captured step reads and writes. Unlike
    `torch.amp.GradScaler`, it can wait for several consecutive overflows before it backs off, like
    Paddle's, and its state is the canonical one of every engine.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe = recipe
        self._used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self._dynamic = self._used and recipe.loss_scaling == "dynamic"
        self.value = torch.tensor(recipe.loss_scale if self._used else 1.0, device=device)
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
        if not self._used:
            update(None, None)
            return
        overflow = self.never
        if self._dynamic:
            overflow = find_overflow() if find_overflow is not None else self._overflow(gradients)
        update(self.value, overflow)
        if self._dynamic:
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

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self._dynamic:
            return {}
        return {
            "scale": self.value.item(),
            "good_steps": self._good.item(),
            "bad_steps": self._bad.item(),
        }

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self._dynamic:
            state = state or {"scale": self._recipe.loss_scale, "good_steps": 0, "bad_steps": 0}
            self.value.fill_(state["scale"])
            self._good.fill_(int(state["good_steps"]))
            self._bad.fill_(int(state["bad_steps"]))
