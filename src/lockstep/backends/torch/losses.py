"""How a batch is mixed, and the training loss of its images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import read_class_weights


def mix_images(
    x: Tensor, coefficients: Tensor, partners: Tensor, boxes: Tensor | None = None
) -> Tensor:
    """Return images [N, 3, H, W] mixed with their partners: by coefficients [N], and within boxes
    [N, 4] by the partner's pixels alone."""
    weight = coefficients.view(-1, 1, 1, 1)
    if boxes is not None:
        weight = torch.where(_find_inside(boxes, *x.shape[2:]), 0, weight)
    return weight * x + (1 - weight) * x[partners]


def _find_inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return whether a pixel is within its image's box: bool [N, 1, H, W]."""
    top, left, tall, wide = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=boxes.device).view(-1, 1)
    columns = torch.arange(width, device=boxes.device)
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


class ImageLosses(nn.Module):
    """The training loss of every image of a batch, from float32 logits."""

    class_weights: Tensor | None

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        weights = read_class_weights(recipe.class_weights)
        self.register_buffer(
            "class_weights", None if weights is None else torch.tensor(weights), persistent=False
        )

    def forward(
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
        of_partners = self._cross_entropy(logits, labels[partners])
        return coefficients * losses + (1 - coefficients) * of_partners

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            labels,
            weight=self.class_weights,
            reduction="none",
            label_smoothing=self._recipe.label_smoothing,
        )

    def _binary_cross_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        coefficients: Tensor | None,
        partners: Tensor | None,
    ) -> Tensor:
        classes = logits.shape[1]
        smoothing = self._recipe.label_smoothing
        targets = F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
        if coefficients is not None and partners is not None:
            own = coefficients[:, None]
            targets = own * targets + (1 - own) * targets[partners]
        above = self._recipe.binarised_above
        if above is not None:
            targets = (targets > above).float()
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.mean(dim=1) if self._recipe.class_reduction == "mean" else losses.sum(dim=1)
