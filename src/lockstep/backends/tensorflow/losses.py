"""How a batch is mixed, and the training loss of its images."""

import tensorflow as tf

from lockstep.backends.tensorflow.model import Tensor
from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import read_class_weights


def mix_images(
    x: Tensor, coefficients: Tensor, partners: Tensor, boxes: Tensor | None = None
) -> Tensor:
    """Return images [N, H, W, 3] mixed with their partners: by coefficients [N], and within boxes
    [N, 4] by the partner's pixels alone."""
    weight = tf.reshape(coefficients, [-1, 1, 1, 1])
    if boxes is not None:
        weight = tf.where(_find_inside(boxes, x.shape[1], x.shape[2]), 0.0, weight)
    return weight * x + (1 - weight) * tf.gather(x, partners)


def _find_inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return whether a pixel is within its image's box: bool [N, H, W, 1]."""
    top, left, tall, wide = tf.unstack(tf.reshape(boxes, [-1, 4, 1, 1, 1]), axis=1)
    rows = tf.range(height)[:, None, None]
    columns = tf.range(width)[:, None]
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


class ImageLosses:
    """The training loss of every image of a batch, from float32 logits."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._class_weights = read_class_weights(recipe.class_weights)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        coefficients: Tensor | None = None,
        partners: Tensor | None = None,
    ) -> Tensor:
        """Return the losses [N] of logits [N, K] and labels [N]. The target of an image has its own
        label with its coefficient and its partner's label with the rest."""
        if self._recipe.loss == "binary_cross_entropy":
            return self._binary_cross_entropy(logits, labels, coefficients, partners)
        losses = self._cross_entropy(logits, labels)
        if coefficients is None or partners is None:
            return losses
        of_partners = self._cross_entropy(logits, tf.gather(labels, partners))
        return coefficients * losses + (1 - coefficients) * of_partners

    def _smooth(self, labels: Tensor) -> Tensor:
        smoothing = self._recipe.label_smoothing
        classes = self._recipe.logits
        return tf.one_hot(labels, classes, 1 - smoothing + smoothing / classes, smoothing / classes)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._recipe.label_smoothing == 0 and self._class_weights is None:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        target = self._smooth(labels)
        if self._class_weights is not None:
            # TensorFlow's own operation has the right gradient only if a target sums to 1.
            return -tf.reduce_sum(self._class_weights * target * tf.nn.log_softmax(logits), axis=1)
        return tf.nn.softmax_cross_entropy_with_logits(target, logits)

    def _binary_cross_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        coefficients: Tensor | None,
        partners: Tensor | None,
    ) -> Tensor:
        targets = self._smooth(labels)
        if coefficients is not None and partners is not None:
            own = coefficients[:, None]
            targets = own * targets + (1 - own) * tf.gather(targets, partners)
        above = self._recipe.binarised_above
        if above is not None:
            targets = tf.cast(targets > above, tf.float32)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, logits)
        if self._recipe.class_reduction == "mean":
            return tf.reduce_mean(losses, axis=1)
        return tf.reduce_sum(losses, axis=1)
