"""Engines with one fault each, made from the reference engine, for `test_faults`.

A fault is a changed recipe, changed learning rates, an overridden method, or a function of
`functions` that is replaced while the engine computes. The oracle computes outside of this and is
not affected.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from lockstep.backends import Interval, World
from lockstep.backends.reference import functions as f
from lockstep.backends.reference.engine import ReferenceEngine, ReferenceHandle
from lockstep.data import Batch
from lockstep.models.metrics import Counts, Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe

Array = np.ndarray
Build = Callable[[Recipe, Array, World, Execution], Any]


def make_backend(build: Build) -> Any:
    """Return the part of a backend that is needed to start an engine."""
    return SimpleNamespace(name="reference", engine=build)


def change_recipe(change: Callable[[Recipe], dict[str, Any]]) -> Build:
    """An engine with another recipe."""
    return lambda recipe, rates, world, execution: ReferenceEngine(
        recipe.replace(**change(recipe)), rates, world, execution
    )


def change_rates(change: Callable[[Array], Array]) -> Build:
    """An engine with other learning rates."""
    return lambda recipe, rates, world, execution: ReferenceEngine(
        recipe, change(rates), world, execution
    )


def change_function(
    name: str, wrong: Callable[..., Any], *, only: str = "train evaluate predict"
) -> Build:
    """An engine whose methods in `only` compute with another function instead of one in
    `functions`."""

    def replace_method(method: str) -> Callable[..., Any]:
        def call(self: ReferenceEngine, *arguments: Any, **named: Any) -> Any:
            with patch.object(f, name, wrong):
                return getattr(ReferenceEngine, method)(self, *arguments, **named)

        return call

    return type(
        "Wrong", (ReferenceEngine,), {method: replace_method(method) for method in only.split()}
    )


# Functions. The right ones are kept here: within a wrong engine, `functions` has wrong ones under
# the same names.

_batch_norm = f.batch_norm
_mix = f.mix
_normalise = f.normalise
_fake_quantised = f.fake_quantise
_running_statistics = f.running_statistics
_targets = f.targets
_cross_entropy = f.cross_entropy
_drop = f.drop
_blur = f.blur
_average_pool_2x2 = f.average_pool_2x2
_scale_channels = f.scale_channels


def images_mixed_alone(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, coefficients, partners) if x.ndim == 4 else x


def mix_by_the_first(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, np.full_like(coefficients, coefficients[0]), partners)


def mix_the_other_way(x: Array, coefficients: Array, partners: Array) -> Array:
    return _mix(x, 1 - coefficients, partners)


def smooth_over_the_others(
    labels: Array, logits: int, *, smoothing: float, dtype: np.dtype
) -> Array:
    """Return targets in which the label keeps 1 - s and each of the other K - 1 classes gets s / (K
    - 1)."""
    one_hot = np.eye(logits, dtype=dtype)[labels]
    return (1 - smoothing) * one_hot + smoothing / (logits - 1) * (1 - one_hot)


def bias_statistics(*arguments: Array, values: int, momentum: float) -> tuple[Array, Array]:
    return _running_statistics(*arguments, values=10**12, momentum=momentum)


def constant_statistics(x: Array, scale: Array, bias: Array, *, epsilon: float) -> tuple[Any, ...]:
    """Return a batch norm whose backward pass treats mean and variance as constants."""
    y, mean, variance, back = _batch_norm(x, scale, bias, epsilon=epsilon)
    return (
        y,
        mean,
        variance,
        lambda d_y: (scale / np.sqrt(variance + epsilon) * d_y, *back(d_y)[1:]),
    )


def without_epsilon(x: Array, scale: Array, bias: Array, *, epsilon: float) -> tuple[Any, ...]:
    return _batch_norm(x, scale, bias, epsilon=1e-12)


def blur_with_zeros(x: Array, *, stride: int, padding: str) -> tuple[Array, f.Back]:
    return _blur(x, stride=stride, padding="zero")


def average_with_padding(x: Array) -> tuple[Array, f.Back]:
    """Return means of 2x2 values that count zeros beyond an odd edge."""
    height, width = x.shape[1:3]
    y, back = _average_pool_2x2(np.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0))))
    return y, lambda d_y: back(d_y)[:, :height, :width]


def constant_factors(x: Array, factors: Array) -> tuple[Array, Any]:
    """Return channels times factors, whose backward pass treats the factors as constants."""
    y, back = _scale_channels(x, factors)
    return y, lambda d_y: (back(d_y)[0], np.zeros_like(factors))


def before_ties(logits: Array, labels: Array) -> Array:
    """Return ranks in which a label comes before all classes with the same logit."""
    return (logits > logits[np.arange(len(labels)), labels][:, None]).sum(axis=1)


def behind_ties(logits: Array, labels: Array) -> Array:
    return (logits >= logits[np.arange(len(labels)), labels][:, None]).sum(axis=1) - 1


def blue_first(images: Array, mean: Array, std: Array) -> Array:
    return _normalise(images, mean[::-1], std[::-1])


def weigh_by_the_image(logits: Array, target: Array) -> tuple[Array, Callable[[], Array]]:
    """Return the mean over the weights of the images instead of the mean over the images."""
    losses, back = _cross_entropy(logits, target)
    return losses * len(losses) / target.sum(), lambda: back() * len(losses) / target.sum()


def targets_sum_to_1(logits: Array, target: Array) -> tuple[Array, Callable[[], Array]]:
    """Return the gradient for targets that sum to 1, though weighted targets do not."""
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return _cross_entropy(logits, target)[0], lambda: (probabilities - target) / len(logits)


def drop_without_scaling(x: Array, kept: Array, dropout: float) -> tuple[Array, Any]:
    return _drop(x, kept, 0.0)


def drop_forward_alone(x: Array, kept: Array, dropout: float) -> tuple[Array, Any]:
    return _drop(x, kept, dropout)[0], lambda d_y: d_y


def drop_of_the_next_image(x: Array, kept: Array, dropout: float) -> tuple[Array, Any]:
    return _drop(x, np.roll(kept, -1, axis=0), dropout)


def sum_losses(logits: Array, target: Array) -> tuple[Array, Callable[[], Array]]:
    """Return the gradient of the sum of all losses instead of their mean."""
    losses, back = _cross_entropy(logits, target)
    return losses, lambda: back() * len(logits)


def symmetric(length: int, kernel: int, stride: int, kind: str) -> tuple[int, int]:
    return kernel // 2, kernel // 2


def odd_row_before(length: int, kernel: int, stride: int, kind: str) -> tuple[int, int]:
    """Return SAME padding with the odd row before the image."""
    if kind == "symmetric":
        return kernel // 2, kernel // 2
    total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
    return total - total // 2, total // 2


def not_quantised(x: Array, scale: Array) -> tuple[Array, Callable[[Array], Array]]:
    return x, lambda d_y: d_y


def quantise_per_tensor(x: Array, scale: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return weights quantised by the largest of their scales instead of each channel's own."""
    return _fake_quantised(x, np.max(scale))


def quantise_with_a_gradient_everywhere(
    x: Array, scale: Array
) -> tuple[Array, Callable[[Array], Array]]:
    return _fake_quantised(x, scale)[0], lambda d_y: d_y


# Methods


class MaskedOnce(ReferenceEngine):
    """Forgets its masks after a step."""

    def _step(self, batch: Batch, step: int) -> Counts:
        counts = super()._step(batch, step)
        self._masks = {}
        return counts


class MaskedByProduct(ReferenceEngine):
    """Multiplies gradients by masks: infinity times 0 is NaN."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        gradients, counts = super()._gradients(batch, rows)
        self._last_gradients = gradients
        return gradients, counts

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        for name, mask in self._masks.items():
            gradients[name] = self._last_gradients[name] / self._scale.value * mask
        super()._update(gradients, step)


class MasksWeightsAlone(ReferenceEngine):
    """Sets weights to 0 after every step, but not their velocities and averages."""

    def _step(self, batch: Batch, step: int) -> Counts:
        masks = self._masks
        self._masks = {}
        counts = super()._step(batch, step)
        self._masks = masks
        for name, mask in masks.items():
            self._tensors[name] = np.where(mask, self._tensors[name], np.float32(0))
        return counts


class MasksPileUp(ReferenceEngine):
    """Adds new masks to the old ones instead of replacing them."""

    def mask(self, masks: Mapping[str, Array]) -> None:
        super().mask(self._masks | dict(masks))


class MasksOnceWritten(ReferenceEngine):
    """Does not mask a state that is written."""

    def write(self, state: State) -> None:
        masks = self._masks
        self._masks = {}
        super().write(state)
        self._masks = masks


class CalibratesOnTheLastBatch(ReferenceEngine):
    """Forgets the batches before the last one."""

    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        return super().calibrate([list(batches)[-1]])


class DropsTheTail(ReferenceEngine):
    """Evaluates only whole batches."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate([batch for batch in batches if (batch.labels >= 0).all()], ema=ema)


class IsSureOfTheLabel(ReferenceEngine):
    """Returns the probability of the right class as confidence."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        scores = super().evaluate(batches, ema=ema)
        return replace(scores, confidences=np.exp(-scores.losses))


class CountsPadding(ReferenceEngine):
    """Counts padding as images of class 0."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate(
            [Batch(batch.images, np.maximum(batch.labels, 0)) for batch in batches], ema=ema
        )


class DropsNothing(ReferenceEngine):
    """Trains without dropout."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        return super()._gradients(replace(batch, kept_features=None), rows)


class WeighsTheLabel(ReferenceEngine):
    """Weighs all targets of an image by the weight of its label."""

    def _targets(self, labels: Array) -> Array:
        self._class_weights = None
        return super()._targets(labels) * np.array(self._recipe.class_weights)[labels][:, None]


class WeighsScores(ReferenceEngine):
    """Weighs the losses of an evaluation by the classes of its images."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        scores = super().evaluate(batches, ema=ema)
        weights = np.array(self._recipe.class_weights)[scores.labels]
        return replace(scores, losses=weights * scores.losses)


class EvaluatesWhatIsTrained(ReferenceEngine):
    """Does not evaluate the moving average."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        return super().evaluate(batches)


class AveragesLate(ReferenceEngine):
    """Uses the coefficient of the next step. The last step has none, and uses its own."""

    def _average(self, step: int) -> None:
        super()._average(min(step + 1, len(self._ema_decays) - 1))


class AveragesParametersAlone(ReferenceEngine):
    """Does not average the statistics in the moving average."""

    def _average(self, step: int) -> None:
        kept = {name: value for name, value in self._ema.items() if name not in self._velocity}
        super()._average(step)
        self._ema |= kept


class UpdatesInAnyCase(ReferenceEngine):
    """Does not skip a step with overflow."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        gradients, counts = super()._gradients(batch, rows)
        self._last_gradients = {
            name: gradient / self._scale.value for name, gradient in gradients.items()
        }
        return gradients, counts

    def _step(self, batch: Batch, step: int) -> Counts:
        counts = super()._step(batch, step)
        if not all(np.isfinite(gradient).all() for gradient in self._last_gradients.values()):
            self._update(self._last_gradients, step)
        return counts


class KeepsTheScaleInside(ReferenceEngine):
    """Does not divide gradients by the loss scale."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        gradients, counts = super()._gradients(batch, rows)
        return {name: gradient * self._scale.value for name, gradient in gradients.items()}, counts


class SumsParts(ReferenceEngine):
    """Adds the gradients of parts instead of averaging them."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        gradients, counts = super()._gradients(batch, rows)
        return {name: gradient * self._parts for name, gradient in gradients.items()}, counts


class LosesMomentum(ReferenceEngine):
    """Starts from a written state without its velocities."""

    def write(self, state: State) -> None:
        super().write(
            replace(state, momentum={name: np.zeros_like(v) for name, v in state.momentum.items()})
        )


class LosesTheScaler(ReferenceEngine):
    """Starts from a written state with the recipe's initial loss scale."""

    def write(self, state: State) -> None:
        super().write(replace(state, scaler={}))


class LosesTheAverage(ReferenceEngine):
    """Starts a new moving average when a state is written."""

    def write(self, state: State) -> None:
        super().write(replace(state, ema={name: state.tensors[name] for name in state.ema}))


class ReportsTheLastLoss(ReferenceEngine):
    """Reports the loss of the last step of an interval for all its steps."""

    def fetch(self, handle: ReferenceHandle) -> Interval:
        interval = super().fetch(handle)
        return replace(interval, losses=np.full_like(interval.losses, interval.losses[-1]))


class PredictsInTraining(ReferenceEngine):
    """Normalises by the batch's own statistics in inference."""

    def _logits(self, images: Array, recipe: Recipe, *, ema: bool = False) -> Array:
        def use_batch_statistics(
            x: Array, scale: Array, bias: Array, *_: Array, epsilon: float
        ) -> tuple[Array, None]:
            return _batch_norm(x, scale, bias, epsilon=epsilon)[0], None

        with patch.object(f, "batch_norm_in_inference", use_batch_statistics):
            return super()._logits(images, recipe, ema=ema)


def v1_for_v15(recipe: Recipe) -> dict[str, Any]:
    return {"model": replace(recipe.spec, stride_in="1x1")}
