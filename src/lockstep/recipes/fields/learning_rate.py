"""How long a run is, how many images a step has, and its learning rates."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import NotNegative, Positive


class LearningRateFields(Settings):
    """How long a run is, how many images a step has, and its learning rates."""

    epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 90
    """Number of passes over the training images. Every epoch leaves out the images of an incomplete
    last step. NVIDIA's PaddlePaddle and MXNet code fill that step with images that they
    train on twice."""
    global_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Number of images in one optimizer step, over all ranks and accumulation steps."""
    lr: Positive = 0.256
    """Peak learning rate. If `lr_scaling` is "linear", it is the peak for `lr_batch_images` images
    a step."""
    lr_scaling: Literal["linear", "none"] = "linear"
    """"linear": the peak is lr * global_batch_images / lr_batch_images. "none": the peak is lr."""
    lr_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Number of images in a step for which `lr` is meant. It is used if `lr_scaling` is "linear".
    """
    lr_unit: Literal["step", "epoch"] = "step"
    """"step": the learning rate changes every step. "epoch": it stays the same through an epoch."""
    warmup_epochs: Annotated[NotNegative, limits.EPOCHS] = 5.0
    """Length of the warm-up in epochs: the learning rate rises linearly from `warmup_start_lr` to
    the peak. 0: none."""
    warmup_start_lr: NotNegative = 0.0
    """Learning rate at which the warm-up begins."""
    warmup_counts_from: Literal[0, 1] = 0
    """Position of the first step (or epoch, as in `lr_unit`) on the line of the warm-up. 0: at
    `warmup_start_lr`. 1: one increment above it."""
    warmup_from_batch_images: Annotated[int, Field(ge=0), limits.COUNTED] = 0
    """The warm-up is used only if a step has at least this many images ("512 and up" on NVIDIA's
    pages)."""
    lr_decay: Literal["cosine", "linear", "polynomial", "exponential", "step"] = "cosine"
    """How the learning rate falls from the peak. The formulas are in `lockstep.recipes.schedule`.
    """
    lr_decay_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the decay begins, unless it is "step". "warmup_end": where the warm-up ends. "start":
    at the first step, so the rate jumps down where the warm-up ends."""
    lr_end: NotNegative = 0.0
    """Learning rate at which the decay ends, unless it is "step". The decay "exponential" needs a
    rate above 0."""
    lr_power: Positive = 2.0
    """Power of the decay "polynomial". 1 is the decay "linear"."""
    lr_step_epochs: tuple[Annotated[NotNegative, limits.EPOCHS], ...] = ()
    """Epochs after which the decay "step" multiplies the learning rate by `lr_step_factor`."""
    lr_step_factor: Positive = 0.1
    """Factor by which the decay "step" multiplies the learning rate after each of `lr_step_epochs`.
    """

    @model_validator(mode="after")
    def _check_learning_rate_fields(self) -> Self:
        if self.lr_decay == "exponential" and self.lr_end == 0:
            raise ValueError(
                'lr_decay "exponential" needs an lr_end above 0, such as a thousandth of the peak'
            )
        if self.lr_decay == "step" and not self.lr_step_epochs:
            raise ValueError('lr_decay "step" needs lr_step_epochs, such as [30, 60, 80]')
        return self
