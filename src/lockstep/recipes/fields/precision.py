"""The precision of the computation, loss scaling, pruning and quantisation."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Positive


class PrecisionFields(Settings):
    """The precision of the computation, and loss scaling."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp16"
    """Precision of convolutions and matrix products. Weights, statistics and updates are always
    float32. "tf32" is float32 with TensorFloat-32 products where a GPU has them. With "fp16",
    evaluations are in fp32."""
    loss_scaling: Literal["none", "static", "dynamic"] = "none"
    """Loss scaling, applied in fp16 only. "static": the scale is constant. "dynamic": a step with a
    gradient that is not finite is skipped, and the scale is adapted."""
    loss_scale: Positive = 128.0
    """The loss scale. With dynamic loss scaling, the initial one."""
    loss_scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_growth_steps` steps
    without overflow."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1000
    """Number of consecutive steps without overflow after which a dynamic loss scale is multiplied
    by `loss_scale_growth`."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_backoff_steps` steps
    with overflow."""
    loss_scale_backoff_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1
    """Number of consecutive steps with overflow after which a dynamic loss scale is multiplied by
    `loss_scale_backoff`."""


class CompressionFields(Settings):
    """Pruning and quantisation."""

    sparsity: Literal["none", "mask_1d", "mask_2d_greedy", "mask_2d_best"] = "none"
    """2:4 structured sparsity (arXiv:2104.08378). This algorithm of `lockstep.weights.sparsity`
    prunes the weights that a run starts from. Pruned weights stay 0. It needs trained weights to
    start from (`train --weights`)."""
    sparsity_excluded: tuple[str, ...] = ("fc.weight",)
    """Names of tensors that are not pruned. NVIDIA's PaddlePaddle code does not prune the
    classifier."""
    quantisation: Literal["none", "int8"] = "none"
    """"int8": convolutions and the classifier compute with weights and inputs rounded to int8, in
    training and evaluation (`lockstep.models.quantisation`). It needs trained weights to start from
    (`train --weights`)."""
    calibration_images: Annotated[int, Field(ge=1), limits.COUNTED] = 512
    """Number of training images, in the order of the first epoch, from which the scales of inputs
    are found before the first step. It is used if `quantisation` is "int8"."""
