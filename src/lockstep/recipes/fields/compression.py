"""Pruning and quantisation."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings


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
