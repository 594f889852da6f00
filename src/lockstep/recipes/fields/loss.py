"""The training loss, and what mixes or drops its inputs."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.recipes.class_weights import check_class_weights
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Fraction, NotNegative

ClassWeights = Annotated[
    Literal["none", "balanced"] | tuple[NotNegative, ...], BeforeValidator(check_class_weights)
]


TIE = 1e-6
"""A target counts as above `target_threshold` from this difference on. Rounding errors are 1e-7,
and shares of the pixels of an image of 512 pixels are 4e-6 apart."""


class LossFields(Settings):
    """The training loss, and what mixes or drops its inputs."""

    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"
    """The training loss of an image, computed in fp32 with any `precision`. "cross_entropy": of the
    softmax of the logits. "binary_cross_entropy": of the sigmoid of each logit, as if each class
    were a separate question, so that a mixed image may be of both classes (arXiv:2110.00476). The
    loss that evaluations print is cross-entropy without smoothing in both cases."""
    label_smoothing: Fraction = 0.1
    """Label smoothing s: target = (1 - s) * one-hot + s / logits."""
    target_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With binary cross-entropy: a target above this, after smoothing and mixing, becomes 1 and any
    other 0. "Above" means by more than 1e-6, so that rounding does not decide if a share of pixels
    equals the threshold. 0: targets stay as they are."""
    class_reduction: Literal["mean", "sum"] = "mean"
    """Binary cross-entropy of an image: the mean or the sum over the classes."""
    class_weights: ClassWeights = "none"
    """Weights of the classes in the training loss. The loss of an image is the sum over classes k
    of -weight[k] * target[k] * log p[k], with the target after label smoothing and mixing. The loss
    of a step is the mean over its images, as in PyTorch's CrossEntropyLoss(weight) with
    probabilities as targets. Numbers: one for each logit. "balanced": images / (classes * images of
    the class), counted in the training images when the run begins; its recipe.yaml has the numbers.
    A class without images gets 1. "none": all are 1. Validation losses are not weighted."""
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
    cutmix_alpha: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Alpha of CutMix (arXiv:1905.04899): a box of the partner's pixels is pasted into the image.
    With c drawn from Beta(alpha, alpha), it has the share 1 - c of the image's area, and its centre
    is a random pixel; what lies outside of the image is cut off. The pasted share of the pixels is
    the partner's share of the target. 0: no CutMix."""
    mix_switch_probability: Fraction = 0.5
    """Probability of CutMix where both `mixup_alpha` and `cutmix_alpha` are set; else it is
    MixUp."""
    mix_probability: Fraction = 1.0
    """Probability that images are mixed at all, by MixUp or CutMix."""
    mixup_coefficient: Literal["batch", "sample"] = "batch"
    """How often MixUp and CutMix draw: coefficient, box, which of the two, and whether to mix.
    "batch": once for all images of a step, the same on every rank. "sample": for each image."""
    mixup_pairing: Literal["permutation", "reverse"] = "permutation"
    """How MixUp and CutMix choose an image's partner in the batch. "permutation": by a random
    permutation. "reverse": by reversing the batch."""

    @property
    def binarised_above(self) -> float | None:
        """The number above which a target becomes 1; None if targets stay as they are."""
        return self.target_threshold + TIE if self.target_threshold else None

    @property
    def mixes_images(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    @property
    def cutmix_share(self) -> float:
        """Probability that an image that is mixed is mixed by CutMix."""
        if self.mixup_alpha and self.cutmix_alpha:
            return self.mix_switch_probability
        return float(self.cutmix_alpha > 0)

    @model_validator(mode="after")
    def _check_loss_fields(self) -> Self:
        for name in ("mixup_alpha", "cutmix_alpha"):
            if 0 < getattr(self, name) < 0.01:
                raise ValueError(f"{name} must be 0 or at least 0.01, not {getattr(self, name)}")
        if self.loss == "binary_cross_entropy" and self.class_weights != "none":
            raise ValueError(
                "class_weights work only with cross_entropy: with binary_cross_entropy use"
                " sampling=balanced"
            )
        if self.loss == "cross_entropy" and (
            self.target_threshold or self.class_reduction != "mean"
        ):
            raise ValueError(
                "target_threshold and class_reduction work only with binary_cross_entropy: set that"
                " loss, or target_threshold=0 and class_reduction=mean"
            )
        return self
