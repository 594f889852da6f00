"""How a batch is mixed, and the training loss of its images with its gradient, by formulas."""

from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.world import Array
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import read_class_weights


def mix_images(x: Array, batch: Batch, rows: slice, *, channels_last: bool) -> Array:
    """Return normalised images of a part, mixed with their partners as the batch says: by
    coefficients, and within boxes by the partner's pixels alone."""
    if batch.coefficients is None or batch.partners is None:
        return x
    weight = _load(batch.coefficients[rows], np.float32, x.context).reshape((-1, 1, 1, 1))
    if batch.boxes is not None:
        boxes = _load(batch.boxes[rows], np.float32, x.context)
        height, width = x.shape[1:3] if channels_last else x.shape[2:]
        is_outside = 1 - _find_inside(boxes, height, width)
        weight = mx.nd.broadcast_mul(weight, is_outside.expand_dims(3 if channels_last else 1))
    return _mix(x, _load(batch.partners[rows], np.int32, x.context), weight)


def _find_inside(boxes: Array, height: int, width: int) -> Array:
    """Return 1 for a pixel within its image's box, else 0: float32 [N, H, W]."""
    top, left, tall, wide = mx.nd.split(boxes.reshape((-1, 4, 1, 1)), 4, axis=1, squeeze_axis=True)
    rows = _find_between(top, tall, height, (1, -1, 1))
    columns = _find_between(left, wide, width, (1, 1, -1))
    return mx.nd.broadcast_mul(rows, columns)


def _find_between(first: Array, count: Array, length: int, shape: tuple[int, ...]) -> Array:
    """Return 1 for the `count` places from `first` on, else 0, along an axis of this length. Both
    are [N, 1, 1]."""
    places = mx.nd.arange(length, ctx=first.context).reshape(shape)
    is_reached = mx.nd.broadcast_greater_equal(places, first)
    return mx.nd.broadcast_mul(is_reached, mx.nd.broadcast_lesser(places, first + count))


def _load(values: np.ndarray, dtype: Any, context: Any) -> Array:
    return mx.nd.array(values.astype(dtype), context, dtype)


def _mix(values: Array, partners: Array, weight: Array) -> Array:
    return mx.nd.broadcast_mul(values, weight) + mx.nd.broadcast_mul(
        mx.nd.take(values, partners), 1 - weight
    )


class ImageLosses:
    """The training loss of every image of a batch, from float32 logits."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe = recipe
        self._is_binary = recipe.loss == "binary_cross_entropy"
        weights = read_class_weights(recipe.class_weights)
        self._class_weights = (
            None if weights is None else _load(weights.reshape(1, -1), np.float32, context)
        )

    def make_targets(self, labels: Array, batch: Batch, rows: slice) -> Array:
        """Return the targets [N, K] of a part with these labels [N]."""
        targets = mx.nd.one_hot(labels, self._recipe.logits)
        own = batch.target_coefficients
        if own is None:
            own = batch.coefficients
        if own is not None and batch.partners is not None:
            partners = _load(batch.partners[rows], np.int32, labels.context)
            weight = _load(own[rows], np.float32, labels.context)
            targets = _mix(targets, partners, weight.reshape((-1, 1)))
        smoothing = self._recipe.label_smoothing
        targets = (1 - smoothing) * targets + smoothing / self._recipe.logits
        above = self._recipe.binarised_above
        if above is not None:
            return targets > above
        if self._class_weights is not None:
            return mx.nd.broadcast_mul(targets, self._class_weights)
        return targets

    def compute(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return the losses [N], and the gradient of their sum with respect to logits [N, K]."""
        if self._is_binary:
            return self._compute_binary(logits, targets)
        probabilities = mx.nd.softmax(logits)
        log_sums = log_sum_exp(logits)
        if self._class_weights is not None:
            totals = targets.sum(axis=1)
            probabilities = mx.nd.broadcast_mul(probabilities, totals.reshape((-1, 1)))
            log_sums = totals * log_sums
        return log_sums - (targets * logits).sum(axis=1), probabilities - targets

    def _compute_binary(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        losses = logits.relu() - logits * targets + mx.nd.log1p(mx.nd.exp(-logits.abs()))
        slope = logits.sigmoid() - targets
        if self._recipe.class_reduction == "mean":
            return losses.mean(axis=1), slope / self._recipe.logits
        return losses.sum(axis=1), slope


def log_sum_exp(logits: Array) -> Array:
    """Return log(sum(exp(logits))) over the classes: [N]."""
    largest = logits.max(axis=1, keepdims=True)
    return mx.nd.broadcast_sub(logits, largest).exp().sum(axis=1).log() + largest.reshape((-1,))
