"""Batch norm over all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def synchronise(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with batch norms over the images of all ranks.

    On GPUs these are PyTorch's own batch norms, which do not run on CPUs.
    """
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, nn.BatchNorm2d):
                replacement = _SynchronisedBatchNorm(
                    module.num_features, eps=module.eps, momentum=module.momentum
                )
                replacement.load_state_dict(module.state_dict())
                setattr(parent, name, replacement)
    return model


class _SynchronisedBatchNorm(nn.BatchNorm2d):
    """Batch norm with mean and variance in float32 from two differentiable all-reduces."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x = input.float()
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _over_ranks(x.sum(dim=(0, 2, 3))) / count
        centred = x - mean.view(1, -1, 1, 1)
        variance = _over_ranks((centred * centred).sum(dim=(0, 2, 3))) / count
        self._follow(mean.detach(), variance.detach() * (count / (count - 1)))
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def _over_ranks(value: Tensor) -> Tensor:
    return _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """A differentiable all-reduce. PyTorch's own is deprecated, and its successor is private."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
