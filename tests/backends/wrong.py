"""Engines with one fault each, made of the reference engine, for `test_faults`.

A fault is a changed recipe, changed learning rates, a function of the mathematics that is replaced while the engine
computes (the oracle, which computes outside, is left alone), or an overridden method.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from lockstep.backends import Interval, World
from lockstep.backends.reference import functions as f
from lockstep.backends.reference.engine import ReferenceEngine, ReferenceHandle
from lockstep.data import Batch
from lockstep.models.architectures import model_spec
from lockstep.models.metrics import Counts, Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe

Array = np.ndarray
Build = Callable[[Recipe, Array, World, Execution], Any]


def with_recipe(change: Callable[[Recipe], dict[str, Any]]) -> Build:
    """An engine of another recipe."""
    return lambda recipe, rates, world, execution: ReferenceEngine(recipe.replace(**change(recipe)), rates, world, execution)


def with_rates(change: Callable[[Array], Array]) -> Build:
    """An engine with other learning rates."""
    return lambda recipe, rates, world, execution: ReferenceEngine(recipe, change(rates), world, execution)


def with_function(name: str, wrong: Callable[..., Any], *, only: str = "train evaluate predict") -> Build:
    """An engine whose methods `only` compute with another function in the place of one of `functions`."""

    def replaced(method: str) -> Callable[..., Any]:
        def call(self: ReferenceEngine, *arguments: Any, **named: Any) -> Any:
            with patch.object(f, name, wrong):
                return getattr(ReferenceEngine, method)(self, *arguments, **named)

        return call

    return type("Wrong", (ReferenceEngine,), {method: replaced(method) for method in only.split()})


# Functions. The right ones are kept here: within a wrong engine their names in `functions` mean the wrong ones.

_batch_norm, _mix, _normalise = f.batch_norm, f.mix, f.normalise
_running_statistics, _targets, _cross_entropy = f.running_statistics, f.targets, f.cross_entropy


def images_mixed_alone(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, coefficients, partners) if x.ndim == 4 else x


def mixed_by_the_first(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, np.full_like(coefficients, coefficients[0]), partners)


def mixed_the_other_way(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, 1 - coefficients, partners)


def smoothed_over_the_others(labels: Array, logits: int, *, smoothing: float, dtype: np.dtype) -> Array:
    """The label keeps 1 - s, each of the other K - 1 classes gets s / (K - 1)."""
    one_hot = np.eye(logits, dtype=dtype)[labels]
    return (1 - smoothing) * one_hot + smoothing / (logits - 1) * (1 - one_hot)


def biased_statistics(*arguments: Array, values: int, momentum: float) -> tuple[Array, Array]:
    return _running_statistics(*arguments, values=10**12, momentum=momentum)


def still_statistics(mean: Array, variance: Array, *batch: Array, values: int, momentum: float) -> tuple[Array, Array]:
    return mean, variance


def constant_statistics(x: Array, scale: Array, bias: Array, *, epsilon: float) -> tuple[Any, ...]:
    """Batch norm whose backward pass takes mean and variance for constants."""
    y, mean, variance, back = _batch_norm(x, scale, bias, epsilon=epsilon)
    return y, mean, variance, lambda d_y: (scale / np.sqrt(variance + epsilon) * d_y, *back(d_y)[1:])


def without_epsilon(x: Array, scale: Array, bias: Array, *, epsilon: float) -> tuple[Any, ...]:
    return _batch_norm(x, scale, bias, epsilon=1e-12)


def before_ties(logits: Array, labels: Array) -> Array:
    """A label comes before all classes with its logit."""
    return (logits > logits[np.arange(len(labels)), labels][:, None]).sum(axis=1)


def behind_ties(logits: Array, labels: Array) -> Array:
    return (logits >= logits[np.arange(len(labels)), labels][:, None]).sum(axis=1) - 1


def blue_first(images: Array, mean: Array, std: Array) -> Array:
    return _normalise(images, mean[::-1], std[::-1])


def summed(logits: Array, target: Array) -> tuple[Array, Callable[[], Array]]:
    """The gradient of the sum of all losses, not of their mean."""
    losses, back = _cross_entropy(logits, target)
    return losses, lambda: back() * len(logits)


def symmetric(length: int, kernel: int, stride: int, kind: str) -> tuple[int, int]:
    return kernel // 2, kernel // 2


def odd_row_before(length: int, kernel: int, stride: int, kind: str) -> tuple[int, int]:
    """SAME with the odd row before the others."""
    if kind == "symmetric":
        return kernel // 2, kernel // 2
    total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
    return total - total // 2, total // 2


# Methods


class DecaysShortcuts(ReferenceEngine):
    """Takes the batch norm of a shortcut for a kernel: its name is not that of a batch norm."""

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        decay = self._recipe.weight_decay
        found = {name: decay * self._tensors[name] if "downsample.1" in name else 0 for name in gradients}
        super()._update({name: gradient + found[name] for name, gradient in gradients.items()}, rate)


class DecaysApart(ReferenceEngine):
    """Decays the weights, not the gradients."""

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        decayed = [name for name in gradients if self._roles[name] in self._recipe.weight_decay_roles]
        without = {name: -self._recipe.weight_decay * self._tensors[name] for name in decayed}
        before = {name: rate * self._recipe.weight_decay * self._tensors[name] for name in decayed}
        super()._update({name: gradient + without.get(name, 0) for name, gradient in gradients.items()}, rate)
        for name in decayed:
            self._tensors[name] = (self._tensors[name] - before[name]).astype(np.float32)


class RateInside(ReferenceEngine):
    """v = m * v + rate * g; w -= v. What it reads and writes is v / rate, so that one step alone is right."""

    _last: float | None = None

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        ratio = np.float32((self._last or rate) / rate)
        self._velocity = {name: value * ratio for name, value in self._velocity.items()}
        super()._update(gradients, rate)
        self._last = rate


class Nesterov(ReferenceEngine):
    """w -= rate * (g + m * v)"""

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        before = {name: value.copy() for name, value in self._tensors.items()}
        old = {name: value.copy() for name, value in self._velocity.items()}
        super()._update(gradients, rate)
        for name, v in self._velocity.items():
            gradient = v - self._recipe.momentum * old[name]
            self._tensors[name] = (before[name] - rate * (gradient + self._recipe.momentum * v)).astype(np.float32)


class WeightsInHalf(ReferenceEngine):
    """Keeps its weights in the precision it computes in."""

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        super()._update(gradients, rate)
        for name in self._velocity:
            self._tensors[name] = f.rounded(self._tensors[name], self._recipe.precision)


class MaskedOnce(ReferenceEngine):
    """Forgets its masks after a step."""

    def _step(self, batch: Batch, step: int) -> Counts:
        counts = super()._step(batch, step)
        self._masks = {}
        return counts


class MaskedByProduct(ReferenceEngine):
    """Multiplies gradients by masks: infinity times 0 is no number."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        found, counts = super()._gradients(batch, rows)
        self._found = found
        return found, counts

    def _update(self, gradients: dict[str, Array], rate: float) -> None:
        for name, mask in self._masks.items():
            gradients[name] = self._found[name] / self._scale.value * mask
        super()._update(gradients, rate)


class MasksWeightsAlone(ReferenceEngine):
    """Puts weights back to 0 after every step, and lets their velocities and averages be."""

    def _step(self, batch: Batch, step: int) -> Counts:
        masks, self._masks = self._masks, {}
        counts = super()._step(batch, step)
        self._masks = masks
        for name, mask in masks.items():
            self._tensors[name] = np.where(mask, self._tensors[name], np.float32(0))
        return counts


class MasksPileUp(ReferenceEngine):
    """Adds new masks to those set before."""

    def mask(self, masks: Mapping[str, Array]) -> None:
        super().mask(self._masks | dict(masks))


class MasksOnceWritten(ReferenceEngine):
    """Does not mask a state that is written."""

    def write(self, state: State) -> None:
        masks, self._masks = self._masks, {}
        super().write(state)
        self._masks = masks


class DropsTheTail(ReferenceEngine):
    """Evaluates whole batches alone."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate([batch for batch in batches if (batch.labels >= 0).all()], ema=ema)


class IsSureOfTheLabel(ReferenceEngine):
    """Gives the probability of the right class for its confidence."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        scores = super().evaluate(batches, ema=ema)
        return replace(scores, confidences=np.exp(-scores.losses))


class CountsPadding(ReferenceEngine):
    """Takes padding for images of class 0."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate([Batch(batch.images, np.maximum(batch.labels, 0)) for batch in batches], ema=ema)


class EvaluatesWhatIsTrained(ReferenceEngine):
    """Does not evaluate the moving average."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate(batches)


class AveragesLate(ReferenceEngine):
    """Takes the next step's coefficient."""

    def _average(self, step: int) -> None:
        super()._average(step + 1)


class AveragesParametersAlone(ReferenceEngine):
    """Leaves the statistics out of the moving average."""

    def _average(self, step: int) -> None:
        kept = {name: value for name, value in self._ema.items() if name not in self._velocity}
        super()._average(step)
        self._ema |= kept


class UpdatesInAnyCase(ReferenceEngine):
    """Does not skip a step that overflowed."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        found, counts = super()._gradients(batch, rows)
        self._found = {name: gradient / self._scale.value for name, gradient in found.items()}
        return found, counts

    def _step(self, batch: Batch, step: int) -> Counts:
        counts = super()._step(batch, step)
        if not all(np.isfinite(gradient).all() for gradient in self._found.values()):
            self._update(self._found, float(self._learning_rates[step]))
        return counts


class KeepsTheScaleInside(ReferenceEngine):
    """Does not divide the loss scale out."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        found, counts = super()._gradients(batch, rows)
        return {name: gradient * self._scale.value for name, gradient in found.items()}, counts


class SumsParts(ReferenceEngine):
    """Adds the gradients of parts where it should average them."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        found, counts = super()._gradients(batch, rows)
        return {name: gradient * self._parts for name, gradient in found.items()}, counts


class TrainsOnTheLastPart(ReferenceEngine):
    """Overwrites the gradients of a part by those of the next."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        found, counts = super()._gradients(batch, rows)
        last = rows[-1] == len(batch.labels) - 1
        return {name: gradient * last * self._parts for name, gradient in found.items()}, counts


class LosesMomentum(ReferenceEngine):
    """Begins a written state without velocities."""

    def write(self, state: State) -> None:
        super().write(replace(state, momentum={name: np.zeros_like(v) for name, v in state.momentum.items()}))


class LosesTheScaler(ReferenceEngine):
    """Begins a written state with the recipe's first loss scale."""

    def write(self, state: State) -> None:
        super().write(replace(state, scaler={}))


class LosesTheAverage(ReferenceEngine):
    """Begins the moving average of a written state anew."""

    def write(self, state: State) -> None:
        super().write(replace(state, ema={name: state.tensors[name] for name in state.ema}))


class ReportsTheLastLoss(ReferenceEngine):
    """Reports the loss of an interval's last step for all."""

    def fetch(self, handle: ReferenceHandle) -> Interval:
        found = super().fetch(handle)
        return replace(found, losses=np.full_like(found.losses, found.losses[-1]))


class PredictsInTraining(ReferenceEngine):
    """Normalises by the batch's own statistics in inference."""

    def _logits(self, images: Array, ema: bool) -> Array:
        def of_the_batch(x: Array, scale: Array, bias: Array, *_: Array, epsilon: float) -> Array:
            return _batch_norm(x, scale, bias, epsilon=epsilon)[0]

        with patch.object(f, "batch_norm_in_inference", of_the_batch):
            return super()._logits(images, ema)


def v1_for_v15(recipe: Recipe) -> dict[str, Any]:
    return {"model": replace(model_spec(recipe.model), stride_in="1x1")}
