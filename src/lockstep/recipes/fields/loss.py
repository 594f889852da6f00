"""The training loss, and what mixes or drops its inputs."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.recipes.class_weights import check_class_weights
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Fraction, NotNegative

ClassWeights = Annotated[
    Literal["none", "balanced"] | tuple[NotNegative, ...], BeforeValidator(check_class_weights)
]


class LossFields(Settings):
    """The training loss, and what mixes or drops its inputs."""

    label_smoothing: Fraction = 0.1
    """Label smoothing s: target = (1 - s) * one-hot + s / logits."""
    class_weights: ClassWeights = "none"
    """Weights of the classes in the training loss. The loss of an image is the sum over classes k
    of -weight[k] * target[k] * log p[k], with the target after label smoothing and MixUp. The loss
    of a step is the mean over its images, as in PyTorch's CrossEntropyLoss(weight) with
    probabilities as targets. Numbers: one for each logit. "balanced": images / (classes * images of
    the class), counted in the training images when the run begins; its recipe.yaml has the numbers.
    A class without images gets 1. "none": all are 1. The loss of a validation is not weighted."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a feature of an image is set to 0 in front of the classifier, in training.
    The other features are divided by 1 - dropout (arXiv:1207.0580). 0: no dropout."""
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that an image passes the last residual block by its shortcut alone, in training
    (arXiv:1603.09382; timm's `drop_path`). It rises linearly over all blocks, from 0 in the first.
    What a block adds to its other images is divided by 1 - probability. The block's batch norms see
    all images. 0: all blocks are used."""
    mixup_alpha: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Alpha of MixUp (arXiv:1710.09412): coefficients are drawn from Beta(alpha, alpha). 0: no
    MixUp."""
    mixup_coefficient: Literal["batch", "sample"] = "batch"
    """MixUp's coefficients. "batch": one for all images of a step, the same on every rank.
    "sample": one for each image."""
    mixup_pairing: Literal["permutation", "reverse"] = "permutation"
    """How MixUp chooses an image's partner in the batch. "permutation": by a random permutation.
    "reverse": by reversing the batch."""

    @model_validator(mode="after")
    def _check_loss_fields(self) -> Self:
        if 0 < self.mixup_alpha < 0.01:
            raise ValueError(f"mixup_alpha must be 0 or at least 0.01, not {self.mixup_alpha}")
        return self
