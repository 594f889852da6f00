"""The fused batch norms as PyTorch's operators with gradients: `torch.compile` and CUDA graphs keep
them as they are.

They neither wait for the device nor have results whose size depends on values. Importing this
module imports Triton.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels import batch_norm as kernels


@torch.library.custom_op("lockstep::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return batch norm of the batch in `x` [N, C, H, W], with ReLU if asked for, and its
    statistics.

    The statistics are float32 [3, C]: mean, 1 / deviation, unbiased variance. They have no
    gradient. N * H * W must be at least 2.
    """
    return kernels.forward(channels_last(x), None, weight, bias, eps, relu=relu)


@torch.library.custom_op("lockstep::batch_norm_add_relu", mutates_args=())
def batch_norm_add_relu(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ReLU of the residual plus batch norm of `x`, and statistics as `batch_norm` does."""
    return kernels.forward(channels_last(x), channels_last(residual), weight, bias, eps, relu=True)


@torch.library.custom_op("lockstep::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and float32 [2, C]: those of weight and bias."""
    dx, _, gradients = kernels.backward(
        channels_last(dy), channels_last(x), None, weight, bias, statistics, relu=relu
    )
    return dx, gradients


@torch.library.custom_op("lockstep::batch_norm_add_relu_backward", mutates_args=())
def batch_norm_add_relu_backward(
    dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and the residual, and float32 [2, C]: those of weight and bias."""
    return kernels.backward(
        channels_last(dy), channels_last(x), channels_last(y), weight, bias, statistics, relu=True
    )


def channels_last(x: Tensor) -> Tensor:
    """Return a tensor in channels_last; a copy if it lies otherwise, such as the gradient of a mean
    over pixels."""
    return x.contiguous(memory_format=torch.channels_last)


@batch_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> tuple[Tensor, Tensor]:
    return _like(x), weight.new_empty((3, x.shape[1]))


@batch_norm_add_relu.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _like(x), weight.new_empty((3, x.shape[1]))


@batch_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    return _like(x), weight.new_empty((2, x.shape[1]))


@batch_norm_add_relu_backward.register_fake
def _(
    dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(x), weight.new_empty((2, x.shape[1]))


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.relu = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    _only_the_first_has_a_gradient(ctx, output)


def _save_with_output(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, weight, bias, _ = inputs
    ctx.save_for_backward(x, output[0], weight, bias, output[1])
    _only_the_first_has_a_gradient(ctx, output)


def _only_the_first_has_a_gradient(ctx: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise zeros are written for the statistics in each step


def _gradients(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dx, parameters = batch_norm_backward(dy, *ctx.saved_tensors, ctx.relu)
    return dx, parameters[0], parameters[1], None, None


def _gradients_with_residual(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dx, dz, parameters = batch_norm_add_relu_backward(dy, *ctx.saved_tensors)
    return dx, dz, parameters[0], parameters[1], None


batch_norm.register_autograd(_gradients, setup_context=_save)
batch_norm_add_relu.register_autograd(_gradients_with_residual, setup_context=_save_with_output)
