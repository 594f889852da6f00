"""How weights are updated: optimizer, weight decay, moving average, frozen tensors."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.models.architectures import ListedRole
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Fraction, NotNegative, Positive, Prefixes

Beta = Annotated[float, Field(ge=0, lt=1)]

NOT_NAMED_BN: tuple[ListedRole, ...] = (
    *("conv_weight", "fc_weight", "fc_bias"),
    *("shortcut_bn_scale", "shortcut_bn_bias"),
)
"""The roles that are decayed if code excludes parameters with "bn" in their names: it misses the
batch norms of shortcuts, `downsample.1`."""


def _describe_optimizers() -> str:
    """Return what the field `optimizer` means."""
    text = (
        "How gradients g change the weights at the learning rate lr, which may differ by tensor. t"
        " is the number of the step, from 1; steps that an overflow skips count too.\n"
    )
    for name, row in OPTIMIZERS.items():
        text += f'\n- "{name}" ({row.source}): {row.formula}'
    return text


class UpdateFields(Settings):
    """How weights are updated: optimizer, weight decay, moving average, frozen tensors."""

    optimizer: Literal[tuple(OPTIMIZERS)] = Field(default="sgd", description=_describe_optimizers())  # type: ignore[valid-type]
    momentum: Fraction = 0.875
    """`momentum` in the formulas of `optimizer`."""
    nesterov: bool = False
    """Whether "sgd" moves weights by Nesterov's momentum: w -= lr*(g + m*v), with the velocity v =
    m*v + g after this step. It is `--nesterov` of NVIDIA's PyTorch code. No published recipe of
    NVIDIA uses it."""
    beta1: Beta = 0.9
    """Share of the old mean of gradients in the new one, in the formulas of `optimizer`."""
    beta2: Beta = 0.999
    """Share of the old mean of squared gradients in the new one, in the formulas of `optimizer`."""
    optimizer_epsilon: Annotated[float, Field(ge=1e-30, le=1e30)] = 1e-8
    """Added to the root of the mean of squared gradients, or to the mean under the root: see
    `optimizer`. timm's LAMB has 1e-6."""
    clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    """Largest norm of the gradient: the gradients of all trained tensors, over all ranks and
    without loss scale, are multiplied by min(1, clip_norm / (norm + 1e-6)), as PyTorch's
    `clip_grad_norm_` does, before decay is added. 0: no limit."""
    weight_decay: NotNegative = 1 / 32768
    """Weight decay of the tensors whose role is in `weight_decay_roles`. Its formula is in
    `optimizer`."""
    weight_decay_roles: tuple[ListedRole, ...] = ("conv_weight", "fc_weight", "fc_bias")
    """Roles of the tensors that weight decay applies to. `conv_weight` includes the convolutions of
    squeeze-and-excitation, `fc_bias` their biases. `bn_scale` and `bn_bias` are the scales
    and biases of all batch norms; `shortcut_bn_scale` and `shortcut_bn_bias` are only those of the
    batch norms in shortcuts. timm decays conv_weight and fc_weight, torchvision's script with
    `--norm-weight-decay 0` those and fc_bias."""
    ema_decay: Fraction = 0.0
    """Decay of the moving average of weights and statistics: average = decay*average + (1 -
    decay)*weights. 0: no average. It is updated at most once in a step, with any number of
    accumulation parts. NVIDIA's PyTorch code updates it after every part, so that with several
    parts, the average follows the weights faster."""
    ema_every_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1
    """The average is updated in the first step of every epoch and in every n-th step after it
    (torchvision's `--model-ema-steps`)."""
    ema_start: Literal["ramp", "copy", "constant"] = "ramp"
    """The decay of the first updates. "ramp": min(ema_decay, (1 + u) / (10 + u)) after u updates.
    "copy", torchvision's: the average is a copy of the weights up to and including the first update
    after the warm-up. "constant": ema_decay from the first step."""
    ema_scaling: Literal["none", "torchvision"] = "none"
    """"torchvision": the decay is 1 - min(1, (1 - ema_decay) * global_batch_images *
    ema_every_steps / epochs), so that the average spans the same share of a longer run or of one
    with other batches. "none": the decay is `ema_decay`."""
    frozen: Prefixes = ()
    """Tensors that training leaves as they are, with their moving averages: prefixes of their names
    in whole parts, such as "layer1" or "layer4.0.bn1", or "backbone" for all but the classifier. A
    batch norm whose scale and bias are both frozen computes with its running statistics, which
    stay. No gradient is computed below the lowest trained tensor."""
    lr_multipliers: Mapping[str, Positive] = Field(default_factory=dict)
    """Factors of the learning rate by prefix, as in `frozen`. The longest prefix of a tensor's name
    counts; without one the factor is 1. {"backbone": 0.1, "layer4": 0.5}: the classifier learns at
    the full rate, the last stage at half of it, and the rest at a tenth."""
    lr_depth_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate for every step down from the classifier: the rate of a tensor is
    multiplied by lr_depth_decay ^ depth. The depth is 0 in the classifier, 1 in the last block, and
    the number of blocks + 1 in the stem. 1: the same rate everywhere."""

    @model_validator(mode="after")
    def _check_update_fields(self) -> Self:
        if self.nesterov and self.optimizer != "sgd":
            raise ValueError(
                f"nesterov works only with the optimizer sgd, not {self.optimizer}; set"
                " nesterov=false"
            )
        return self
