"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from lockstep.backends.shared.formulas import Formula, Kept, Step
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import check_masks
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays, find_corrections
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors

if TYPE_CHECKING:
    from lockstep.backends.torch.kernels.update import UpdateKernel


@dataclass(frozen=True)
class _Group:
    """Trained parameters with the same weight decay and the same factor of the learning rate."""

    decay: float
    factor: float
    names: list[str]


class Update:
    """The optimizer of a run. It holds all of the state except the model's tensors."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: dict[str, nn.Parameter],
        values: dict[str, Tensor],
        learning_rates: np.ndarray,
        device: torch.device,
        *,
        is_fused: bool = False,
    ) -> None:
        """Take the model's parameters, and all tensors of the state, by canonical name.

        If it `is_fused`, everything is updated by `lockstep.backends.torch.kernels.update`.
        """
        self._recipe = recipe
        self._device = device
        self._parameters = parameters
        self._tensors = values
        factors = rate_factors(recipe)
        self._trained = {name: parameters[name] for name in factors}
        # What changes from step to step is in tables on the device: a captured step repeats what
        # the host passed to it.
        self._rates = torch.tensor(learning_rates, dtype=torch.float32, device=device)
        self._changes = torch.tensor(
            1 - ema_decays(recipe, len(learning_rates)), dtype=torch.float32, device=device
        )
        self._corrections = {
            name: torch.tensor(table, dtype=torch.float32, device=device)
            for name, table in find_corrections(recipe, len(learning_rates)).items()
        }
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._groups = self._build_groups(factors)
        self._factors = torch.tensor([group.factor for group in self._groups], device=device)
        self._removed: dict[str, Tensor] = {}
        self.scale = LossScale(recipe, device)
        self.velocity = {
            name: torch.zeros_like(parameter) for name, parameter in parameters.items()
        }
        self.second_moments: dict[str, Tensor] = {}
        if OPTIMIZERS[recipe.optimizer].has_second_moments:
            self.second_moments = {name: torch.zeros_like(p) for name, p in parameters.items()}
        """Means of squared gradients by name; empty if the optimizer has none."""
        self.ema = (
            {name: t.detach().clone() for name, t in values.items()} if recipe.ema_decay else {}
        )
        """Moving averages by name; empty without `ema_decay`."""
        self._moving = changing_tensors(recipe) if recipe.ema_decay else []
        """Names of the averages that a step moves."""
        self._kernel = self._build_kernel() if is_fused else None

    def _build_kernel(self) -> "UpdateKernel":
        """Return the kernels for all tensors that a step changes. This imports Triton."""
        from lockstep.backends.torch.kernels.update import Row, UpdateKernel

        groups = {name: group for group in self._groups for name in group.names}
        rows = []
        for name in self._trained:
            tensors_of_row = (
                self._tensors[name],
                self.velocity[name],
                self.ema.get(name),
                self._removed.get(name),
            )
            rows.append(Row(*tensors_of_row, groups[name].decay, groups[name].factor))
        statistics = [name for name in self._moving if name not in self._trained]
        rows += [Row(self._tensors[name], average=self.ema[name]) for name in statistics]
        return UpdateKernel(rows, self._recipe.momentum, nesterov=self._recipe.nesterov)

    def _build_groups(self, factors: Mapping[str, float]) -> list[_Group]:
        """Return the groups of the trained parameters, those that are decayed first."""
        table = self._recipe.list_tensors()
        decayed = {tensor.name for tensor in table if self._recipe.decays(tensor)}
        names: dict[tuple[bool, float], list[str]] = {}
        for name in self._trained:
            names.setdefault((name not in decayed, factors[name]), []).append(name)
        decay = self._recipe.weight_decay
        return [
            _Group(0.0 if is_plain else decay, factor, names[is_plain, factor])
            for is_plain, factor in sorted(names)
        ]

    def begin(self, first: int) -> None:
        """Number the next step `first`. Each step that is taken has the number after the one
        before."""
        self._number.fill_(first)

    def apply(self, *, is_captured: bool = False) -> None:
        """Update everything with the gradients of a step, and forget them.

        If the step `is_captured`, `finish_capture` must be called before the graph is replayed.
        """
        gradients = [_gradient(parameter) for parameter in self._trained.values()]
        formula = FORMULAS[self._recipe.optimizer]
        if self._kernel is None or self._recipe.clip_norm:
            self._clear_removed_gradients()
        if self._kernel is not None:
            self._kernel.point_to(gradients, is_captured=is_captured)
            self.scale.step(gradients, self._move_everything, self._kernel.find_overflow)
        elif formula is None:
            self.scale.step(gradients, self._move_by_velocities)
        else:
            self.scale.step(gradients, partial(self._move_by_formula, formula))
        self.forget_gradients()
        if self.ema and self._kernel is None:
            self._average()
        self._number.add_(1)

    def finish_capture(self) -> None:
        """Give the device what a captured step reads besides its own tensors: where its gradients
        are."""
        if self._kernel is not None:
            self._kernel.upload()

    def _clear_removed_gradients(self) -> None:
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        for name, removed in self._removed.items():
            gradient = self._parameters[name].grad
            if gradient is not None:
                gradient.masked_fill_(removed, 0.0)

    def _find_divisor(self) -> Tensor:
        """Return what gradients are divided by, float32 []: the loss scale, and with `clip_norm`
        what exceeds it."""
        largest = self._recipe.clip_norm
        if not largest:
            return self.scale.value
        gradients = [_gradient(parameter) for parameter in self._trained.values()]
        norm = torch.nn.utils.get_total_norm(gradients) / self.scale.value
        return self.scale.value * torch.clamp((norm + 1e-6) / largest, min=1.0)

    def _move_everything(self, scale: Tensor | None, overflow: Tensor | None) -> None:
        assert self._kernel is not None
        if overflow is None:
            overflow = self.scale.never
        self._kernel(self._find_divisor(), overflow, self._rates, self._changes, self._number)

    @torch.no_grad()
    def _average(self) -> None:
        """Move the averages of what changes a share of their distance from their tensors."""
        averages = [self.ema[name] for name in self._moving]
        distances = torch._foreach_sub([self._tensors[name] for name in self._moving], averages)
        torch._foreach_mul_(distances, self._take_entry(self._changes))
        torch._foreach_add_(averages, distances)

    def _take_entry(self, table: Tensor) -> Tensor:
        """Return the entry of a table [steps] for this step, float32 []."""
        return table.index_select(0, self._number).squeeze(0)

    @torch.no_grad()
    def _move_by_velocities(self, scale: Tensor | None, overflow: Tensor | None) -> None:
        """Take a step of SGD, unless there is an `overflow`.

        This calls the function behind `torch.optim.SGD`. The class itself imports `torch._dynamo`,
        which takes a third of the time until a process trains.
        """
        # At momentum 0 PyTorch keeps no velocity. With the smallest number it keeps the gradient,
        # as the protocol requires.
        momentum = self._recipe.momentum or sys.float_info.min
        if self._recipe.clip_norm:
            scale = self._find_divisor()
        rates = self._take_entry(self._rates) * self._factors
        for group, rate in zip(self._groups, rates.unbind(), strict=True):
            sgd(
                [self._parameters[name] for name in group.names],
                [_gradient(self._parameters[name]) for name in group.names],
                [self.velocity[name] for name in group.names],
                fused=True,
                grad_scale=scale,
                found_inf=overflow,
                weight_decay=group.decay,
                momentum=momentum,
                lr=rate,  # type: ignore[arg-type]
                dampening=0.0,
                nesterov=self._recipe.nesterov,
                maximize=False,
            )

    @torch.no_grad()
    def _move_by_formula(
        self, formula: Formula, scale: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Take a step of an optimizer by a formula, unless there is an `overflow`.

        Then gradients, the rate, and the shares of new gradients in means are 0, which changes
        nothing and needs no branch.
        """
        used = 1 - (self.scale.never if overflow is None else overflow)
        gradients = [_gradient(parameter) for parameter in self._trained.values()]
        by_name = dict(
            zip(self._trained, torch._foreach_div(gradients, self._find_divisor()), strict=True)
        )
        if self.scale.is_dynamic:
            by_name = {name: torch.where(used > 0, g, 0.0) for name, g in by_name.items()}
        rate = self._take_entry(self._rates) * used
        corrections = {name: self._take_entry(table) for name, table in self._corrections.items()}
        for group in self._groups:
            own_rate = rate * group.factor
            decay = group.decay or None
            step = ListStep(self._recipe, own_rate, decay, corrections, used)
            kept = Kept([self.velocity[name] for name in group.names])
            if self.second_moments:
                kept.second_moment = [self.second_moments[name] for name in group.names]
            weights: Tensors = [self._parameters[name] for name in group.names]
            step.move(formula, weights, kept, [by_name[name] for name in group.names])

    def forget_gradients(self) -> None:
        """Free the memory of all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. Raises `CheckpointError` if one does not fit."""
        check_masks(
            {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}, masks
        )
        self._removed = {
            name: self._laid_out(name, ~np.asarray(mask, bool)) for name, mask in masks.items()
        }
        if self._kernel is not None:
            self._kernel = self._build_kernel()
        self.apply_masks()

    def _laid_out(self, name: str, removed: np.ndarray) -> Tensor:
        """Return a mask on the device that lies in memory as its parameter does."""
        return torch.empty_like(
            self._parameters[name], dtype=torch.bool, requires_grad=False
        ).copy_(torch.tensor(removed))

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Set what masks remove from weights, velocities and averages to 0."""
        for name, removed in self._removed.items():
            for values in (self._parameters, self.velocity, self.second_moments, self.ema):
                if name in values:
                    values[name].masked_fill_(removed, 0.0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


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


Tensors = list[Tensor] | tuple[Tensor, ...]


class ListStep(Step):
    """A step for lists of tensors with the same rate and decay, and of what is kept for them.

    The rate and the corrections are float32 []; so is `used`, 0 if an overflow skips the step, else
    1.
    """

    def move(self, formula: Formula, weights: Tensors, kept: Kept, gradients: Tensors) -> None:
        """Take the step with gradients, unscaled and limited."""
        optimizer = OPTIMIZERS[self.recipe.optimizer]
        if self.decay is not None and optimizer.decays == "gradient":
            gradients = torch._foreach_add(gradients, weights, alpha=self.decay)
        if optimizer.velocity == "mean":
            self.approach(kept.velocity, gradients, "beta1")
        if optimizer.has_second_moments:
            self.approach(kept.second_moment, torch._foreach_mul(gradients, gradients), "beta2")
        moves = formula(self, kept, gradients)
        if self.decay is not None and optimizer.decays == "move":
            torch._foreach_add_(moves, weights, alpha=self.decay)
        if self.decay is not None and optimizer.has_trust_ratio:
            self.stretch(weights, moves)
        if optimizer.velocity != "move":
            torch._foreach_mul_(moves, self.rate)
        torch._foreach_sub_(weights, moves)

    def find_root(self, kept: Kept) -> Tensors:
        """Return the corrected roots of second moments, increased by epsilon."""
        roots = torch._foreach_sqrt(kept.second_moment)
        torch._foreach_mul_(roots, self.corrections["root"])
        torch._foreach_add_(roots, self.recipe.optimizer_epsilon)
        return roots

    def approach(self, mean: Tensors, value: Tensors, beta: str) -> None:
        """Give new values the share 1 - beta in means, if the step is taken."""
        distances = torch._foreach_sub(value, mean)
        torch._foreach_mul_(distances, (1 - getattr(self.recipe, beta)) * self.used)
        torch._foreach_add_(mean, distances)

    def stretch(self, weight: Tensors, move: Tensors) -> None:
        """Give moves the lengths of their weights, unless one of both is 0."""
        before = torch.stack(torch._foreach_norm(weight))
        after = torch.stack(torch._foreach_norm(move))
        ratios = torch.where((before > 0) & (after > 0), before / after, 1.0)
        torch._foreach_mul_(move, ratios.unbind())


def _adamw(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    moves = torch._foreach_mul(kept.velocity, step.corrections["mean"])
    torch._foreach_div_(moves, step.find_root(kept))
    return moves


def _nadam(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    moves = torch._foreach_mul(kept.velocity, step.corrections["nesterov_mean"])
    corrected = torch._foreach_mul(gradients, step.corrections["nesterov_gradient"])
    torch._foreach_add_(moves, corrected)
    torch._foreach_div_(moves, step.find_root(kept))
    return moves


def _rmsprop_tf(step: ListStep, kept: Kept, gradients: Tensors) -> Tensors:
    roots = torch._foreach_add(kept.second_moment, step.recipe.optimizer_epsilon)
    torch._foreach_sqrt_(roots)
    changes = torch._foreach_div(gradients, roots)
    torch._foreach_mul_(changes, step.rate)
    torch._foreach_mul_(kept.velocity, torch.where(step.used > 0, step.recipe.momentum, 1.0))
    torch._foreach_add_(kept.velocity, changes)
    return torch._foreach_mul(kept.velocity, step.used)


FORMULAS: dict[str, Formula | None] = {
    "sgd": None,
    "adamw": _adamw,
    "lamb": _adamw,
    "nadam": _nadam,
    "rmsprop_tf": _rmsprop_tf,
}
"""By the names in `OPTIMIZERS`; they return new tensors. SGD is PyTorch's own operation."""
