"""Where a run starts, which of its evaluations is the best, and what is held out."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from lockstep.recipes import limits
from lockstep.recipes.best_evaluation import Selection
from lockstep.recipes.field_validation import Settings


class RunFields(Settings):
    """Where a run starts, which of its evaluations is the best, and what is held out."""

    linear_probe: bool = False
    """Whether a run from weights for other classes starts from a linear probe: the
    classifier that best fits the features of the training images without augmentation
    (`lockstep.runs.linear_probe`). If false, it starts from the recipe's initial classifier."""
    selection: Selection = "top1"
    """The value of an evaluation that decides which checkpoint is the best one, and when early
    stopping ends the run. "top1": the share of images that are classified correctly. "top3", with
    any number: the share of images whose class is among the 3 most probable. "mrr": the mean of
    1 / rank of the right class. "balanced_accuracy": the mean of the classes' recalls. "macro_f1":
    the mean of their F1. "loss": the mean loss, of which the lowest is the best. The trained
    weights and, if there is one, their moving average are compared alike. An equal value is no
    improvement."""
    early_stopping_epochs: Annotated[int, Field(ge=0), limits.EPOCHS] = 0
    """The run ends at the first evaluation that is this many epochs or more after the best one. The
    evaluation at step 0 counts. 0: the run ends with its last epoch."""
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the images that `train --split` sets aside for validation if a data set has no
    validation images. The hash of each image's name decides (`lockstep.data.split`). 0: none,
    because the data set has validation images."""
    temperature_scaling: bool = False
    """Whether a temperature is fitted to the validation images when the run ends. The best
    checkpoint's logits are divided by it for probabilities (arXiv:1706.04599). It changes no
    accuracy and no loss."""
    folds: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of folds of a cross-validation (`train --folds`). The hash of the images' names and
    `seed` divides the training images into this many parts, with equally many of each class. 0:
    none."""
    fold: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of the part used for validation, from 1 to `folds`. 0: none."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random numbers. It decides initial weights, order, crops, flips, MixUp,
    dropout and stochastic depth. Nothing else is random."""

    @model_validator(mode="after")
    def _check_run_fields(self) -> Self:
        if self.folds and not (self.folds >= 2 and 1 <= self.fold <= self.folds):
            raise ValueError(
                f"fold {self.fold} of {self.folds}: expected a fold from 1 to folds, at least 2"
            )
        if self.folds and self.validation_share:
            raise ValueError(
                "folds and validation_share (--split) exclude each other; set only one"
            )
        return self
