"""Mix a batch, and compute the training loss of its images and the scores of an evaluation."""

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.backends.jax.model import Array
from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import read_class_weights


def mix_images(x: Array, coefficients: Array, partners: Array, boxes: Array | None = None) -> Array:
    """Return images [N, H, W, 3] mixed with their partners: by coefficients [N], and within boxes
    [N, 4] by the partner's pixels alone."""
    weight = coefficients[:, None, None, None]
    if boxes is not None:
        weight = jnp.where(_find_inside(boxes, x.shape[1], x.shape[2]), 0.0, weight)
    return weight * x + (1 - weight) * x[partners]


def _find_inside(boxes: Array, height: int, width: int) -> Array:
    """Return whether a pixel is within its image's box: bool [N, H, W, 1]."""
    top, left, tall, wide = (boxes[:, side, None, None, None] for side in range(4))
    rows = jnp.arange(height)[:, None, None]
    columns = jnp.arange(width)[:, None]
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


class ImageLosses:
    """The training loss of every image of a batch, from float32 logits."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._class_weights = read_class_weights(recipe.class_weights)

    def __call__(
        self,
        logits: Array,
        labels: Array,
        coefficients: Array | None = None,
        partners: Array | None = None,
    ) -> Array:
        """Return the losses [N] of logits [N, K] and labels [N]. The target of an image has its own
        label with its coefficient and its partner's label with the rest."""
        targets = self._smooth(labels)
        if coefficients is not None and partners is not None:
            own = coefficients[:, None]
            targets = own * targets + (1 - own) * targets[partners]
        if self._recipe.loss == "binary_cross_entropy":
            return self._binary_cross_entropy(logits, targets)
        if self._class_weights is not None:
            targets = targets * self._class_weights
        return -jnp.sum(targets * _log_softmax(logits), axis=1)

    def _smooth(self, labels: Array) -> Array:
        smoothing = self._recipe.label_smoothing
        classes = self._recipe.logits
        return jnp.where(_is_label(labels, classes), 1 - smoothing, 0.0) + smoothing / classes

    def _binary_cross_entropy(self, logits: Array, targets: Array) -> Array:
        above = self._recipe.binarised_above
        if above is not None:
            targets = (targets > above).astype(jnp.float32)
        # -(t log s + (1 - t) log(1 - s)) with s = 1 / (1 + exp(-x)), without an overflow
        losses = jax.nn.softplus(logits) - logits * targets
        reduce = jnp.mean if self._recipe.class_reduction == "mean" else jnp.sum
        return reduce(losses, axis=1)


def _is_label(labels: Array, classes: int) -> Array:
    """Return whether a class is that of an image: bool [N, K]."""
    return labels[:, None] == jnp.arange(classes)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True))
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=1, keepdims=True))


def rank_labels(logits: Array, labels: Array) -> Array:
    """Return how many classes rank above the label: int32 [N]. Ties go to the lower class. NaN
    ranks first."""
    own = _pick(logits, labels)[:, None]
    before = jnp.arange(logits.shape[1]) < labels[:, None]
    is_ahead = (logits > own) | jnp.isnan(logits) | jnp.isnan(own)
    comes_first = is_ahead | ((logits == own) & before)
    return jnp.sum(comes_first, axis=1, dtype=jnp.int32)


def _pick(values: Array, labels: Array) -> Array:
    """Return the values [N] of the labels' classes."""
    return jnp.take_along_axis(values, labels[:, None], axis=1)[:, 0]


def score_images(logits: Array, labels: Array) -> Array:
    """Return float32 [N, 5]: loss, rank of the right class, prediction, label, confidence."""
    known = jnp.maximum(labels, 0)
    log_p = _log_softmax(logits)
    columns = [
        -_pick(log_p, known),
        rank_labels(logits, known),
        jnp.argmax(logits, axis=1),
        labels,
        jnp.exp(jnp.max(log_p, axis=1)),
    ]
    return jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)
