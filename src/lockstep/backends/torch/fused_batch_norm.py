"""The model's batch norms with ReLU and the sum of a residual block: by PyTorch's operators, or by
fused kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.torch.kernels import refusal, uses_kernels
from lockstep.recipes import Execution, Recipe


def activate(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return ReLU of the batch norm of `x`, to which the shortcut is added before. The plain path
    overwrites `x`."""
    if isinstance(norm, FusedBatchNorm):
        return norm(x, shortcut, relu=True)
    return activate_sum(norm(x), shortcut)


def drop_images(x: Tensor, kept: Tensor, drop_rate: float) -> Tensor:
    """Apply stochastic depth: return 0 where an image of `x` is not `kept`, bool [N], and its
    values divided by 1 - `drop_rate` elsewhere.

    The fused kernels have no such factor, so they compute the batch norm before it alone.
    """
    # In mixed precision this rounds once: a number multiplies in float32, and 0 and 1 are exact.
    return (x * (1 / (1 - drop_rate))).mul_(kept.view(-1, 1, 1, 1))


def activate_sum(x: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return ReLU of `x` plus the shortcut, if there is one. It overwrites `x`."""
    return F.relu(x if shortcut is None else x.add_(shortcut), inplace=True)


class FusedBatchNorm(nn.BatchNorm2d):
    """Batch norm that trains with `lockstep.backends.torch.kernels.operators`. Its tensors are
    those of `nn.BatchNorm2d`."""

    def forward(
        self, input: Tensor, shortcut: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        """Return the batch norm of `input` [N, C, H, W]; with `relu`, plus the shortcut if there is
        one, then ReLU."""
        if not self.training:
            x = super().forward(input)
            return activate_sum(x, shortcut) if relu else x
        if input.numel() == input.shape[1]:
            raise ValueError(
                "a batch norm needs several values of each channel in training, but got"
                f" {tuple(input.shape)}"
            )
        operators = torch.ops.lockstep
        if shortcut is None:
            y, statistics = operators.batch_norm(input, self.weight, self.bias, self.eps, relu)
        else:
            y, statistics = operators.batch_norm_add_relu(
                input, shortcut, self.weight, self.bias, self.eps
            )
        self._follow(statistics)
        return y

    def _follow(self, statistics: Tensor) -> None:
        """Move the running statistics as `nn.BatchNorm2d` does: with weight `momentum`, the
        variance unbiased."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(statistics[0], self.momentum)
        self.running_var.lerp_(statistics[2], self.momentum)


def fuse_batch_norms(
    model: nn.Module, recipe: Recipe, execution: Execution, device: torch.device, ranks: int
) -> None:
    """Replace the batch norms of a model by fused ones, if the run uses fused kernels and they
    compute what it asks for.

    Raises `BackendError` if the execution asks for them and they do not.
    """
    if not uses_kernels(execution, device):
        return
    why_not = _obstacle(recipe, execution, ranks)
    if why_not and execution.fused == "on":
        raise refusal(why_not)
    if not why_not:
        fuse(model)


def _obstacle(recipe: Recipe, execution: Execution, ranks: int) -> str:
    if execution.layout == "nchw":
        return "layout is nchw, and the kernels need nhwc"
    if recipe.batch_norm == "synchronised" and ranks > 1:
        return "batch norm is synchronised over ranks, which the kernels do not support"
    return (
        "the recipe quantises, which the kernels do not support"
        if recipe.quantisation != "none"
        else ""
    )


def fuse(model: nn.Module) -> None:
    """Replace a model's batch norms by fused ones with the same tensors. This imports Triton."""
    from lockstep.backends.torch.kernels import operators  # noqa: F401

    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm) is nn.BatchNorm2d:
                fused = FusedBatchNorm(norm.num_features, eps=norm.eps, momentum=norm.momentum)
                fused.weight = norm.weight
                fused.bias = norm.bias
                fused.running_mean = norm.running_mean
                fused.running_var = norm.running_var
                fused.num_batches_tracked = norm.num_batches_tracked
                setattr(parent, name, fused)
