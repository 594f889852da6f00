"""How a batch is mixed, and the training loss of its images with its gradient, by formulas.
oneDNN's kernels fail on the gradients of the parts of a loss.

The inputs of a loss are tensors by name: `targets` [N, K] and, with class weights, `totals` [N, 1],
their sums over the classes.
"""

import paddle
import paddle.nn.functional as F

from lockstep.backends.paddle.program import Tensors
from lockstep.backends.paddle.world import Tensor
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import read_class_weights


def mix_images(x: Tensor, batch: Batch, rows: slice, *, channels_last: bool) -> Tensor:
    """Return normalised images of a part, mixed with their partners as the batch says: by
    coefficients, and within boxes by the partner's pixels alone."""
    if batch.coefficients is None or batch.partners is None:
        return x
    weight = _load(batch.coefficients[rows], "float32").reshape([-1, 1, 1, 1])
    if batch.boxes is not None:
        boxes = _load(batch.boxes[rows], "int32")
        height, width = x.shape[1:3] if channels_last else x.shape[2:]
        is_outside = _find_outside(boxes, height, width)
        weight = weight * is_outside.unsqueeze(3 if channels_last else 1)
    return weight * x + (1 - weight) * x.index_select(_load(batch.partners[rows], "int64"))


def _find_outside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return 0 for a pixel within its image's box, else 1: float32 [N, H, W]."""
    top, left, tall, wide = boxes.reshape([-1, 4, 1, 1]).unbind(1)
    rows = paddle.arange(height, dtype="int32").unsqueeze(1)
    columns = paddle.arange(width, dtype="int32")
    is_inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return (~is_inside).cast("float32")


def _load(values: object, dtype: str) -> Tensor:
    return paddle.to_tensor(values, dtype=dtype)


class ImageLosses:
    """The training loss of every image of a batch, from float32 logits."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._is_binary = recipe.loss == "binary_cross_entropy"
        weights = read_class_weights(recipe.class_weights)
        self._class_weights = None if weights is None else paddle.to_tensor(weights)

    def make_inputs(self, labels: Tensor, batch: Batch, rows: slice) -> dict[str, Tensor]:
        """Return the inputs of the loss of a part with these labels [N]."""
        targets = F.one_hot(labels, self._recipe.logits)
        own = batch.target_coefficients
        if own is None:
            own = batch.coefficients
        if own is not None and batch.partners is not None:
            weight = _load(own[rows], "float32").reshape([-1, 1])
            partners = _load(batch.partners[rows], "int64")
            targets = weight * targets + (1 - weight) * targets.index_select(partners)
        smoothing = self._recipe.label_smoothing
        targets = (1 - smoothing) * targets + smoothing / self._recipe.logits
        above = self._recipe.binarised_above
        if above is not None:
            targets = (targets > above).cast("float32")
        if self._class_weights is None:
            return {"targets": targets}
        targets = targets * self._class_weights
        return {"targets": targets, "totals": targets.sum(axis=1, keepdim=True)}

    def slope(self, logits: Tensor, inputs: Tensors) -> Tensor:
        """Return the gradient of the sum of the losses with respect to the logits: [N, K]."""
        if self._is_binary:
            slope = F.sigmoid(logits) - inputs["targets"]
            return slope / self._recipe.logits if self._recipe.class_reduction == "mean" else slope
        probabilities = F.softmax(logits, axis=1)
        if self._class_weights is not None:
            probabilities = probabilities * inputs["totals"]
        return probabilities - inputs["targets"]

    def compute(self, logits: Tensor, inputs: Tensors) -> Tensor:
        """Return the losses [N]."""
        targets = inputs["targets"]
        if self._is_binary:
            losses = F.relu(logits) - logits * targets + paddle.log1p(paddle.exp(-logits.abs()))
            is_mean = self._recipe.class_reduction == "mean"
            return losses.mean(axis=1) if is_mean else losses.sum(axis=1)
        # Not by `log_softmax`, which on CPUs returns -64 for every logit that is more than 64
        # below the largest.
        log_sums = paddle.logsumexp(logits, axis=1)
        if self._class_weights is not None:
            log_sums = log_sums * inputs["totals"].squeeze(1)
        return log_sums - (targets * logits).sum(axis=1)
