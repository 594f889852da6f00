"""Errors of a fused batch norm as shares of their bounds, against PyTorch's batch norm and autograd
in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.verification.kernel_bounds import STORAGE, Batch, Bounds, Storage, batch_norm_bounds

EPS = 1e-5
MOST_VALUES = 2**25
"""At most this many values of a tensor are compared at a time, so that float64 fits into memory."""


@dataclass(frozen=True)
class Given:
    """What a batch norm is given, and the gradient of its result."""

    x: Tensor
    """[N, C, H, W], as `residual` and `dy`."""
    weight: Tensor
    bias: Tensor
    residual: Tensor | None
    dy: Tensor
    relu: bool

    def of(self, channels: slice) -> "Given":
        """Return some channels alone."""
        residual = None if self.residual is None else self.residual[:, channels]
        parts = {"x": self.x[:, channels], "dy": self.dy[:, channels], "residual": residual}
        return replace(self, weight=self.weight[channels], bias=self.bias[channels], **parts)


def largest_shares(
    given: Given, found: Mapping[str, Tensor], storage: Storage | None = None
) -> dict[str, float]:
    """Return the largest error of each result as a share of its bound: at most 1 if rounding
    explains it.

    The results are named y, dx, weight_gradient, bias_gradient, mean, rstd (1 / deviation),
    unbiased (variance), and with a residual dz, its gradient. What is not in `found` is not
    compared. `storage` is that of the type by default.
    """
    channels = given.x.shape[1]
    width = max(MOST_VALUES * channels // given.x.numel(), 1)
    result: dict[str, float] = {}
    for first in range(0, channels, width):
        some = slice(first, first + width)
        part = {
            name: value[:, some] if value.dim() == 4 else value[some]
            for name, value in found.items()
        }
        for name, share in _shares(
            given.of(some), part, storage or STORAGE[_name(given.x.dtype)]
        ).items():
            result[name] = max(share, result.get(name, 0.0))
    return result


def _shares(given: Given, found: Mapping[str, Tensor], storage: Storage) -> dict[str, float]:
    # Rounding decides the sign of what is almost 0, so ReLU's gradient passes where the result is
    # positive.
    passes = found["y"] > 0 if given.relu else torch.ones_like(found["y"], dtype=torch.bool)
    right = _expected(given, passes)
    allowed = _allowed(given, passes, storage)
    shares = {}
    for name in found.keys() & right.keys():
        off = (found[name].double() - right[name]).abs()
        off = rows_of(off) if off.dim() == 4 else off
        shares[name] = float(
            torch.where(off == 0, 0.0, off / allowed[name]).nan_to_num(torch.inf).max()
        )
    return shares


def _expected(given: Given, passes: Tensor) -> dict[str, Tensor]:
    x, weight, bias = (
        t.detach().double().requires_grad_() for t in (given.x, given.weight, given.bias)
    )
    norm = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    z = norm if given.residual is None else norm + given.residual.double()
    dz = given.dy.double() * passes
    dx, weight_gradient, bias_gradient = torch.autograd.grad(z, [x, weight, bias], dz)
    z = z.detach()
    rows = x.numel() // x.shape[1]
    variance = x.detach().var(dim=(0, 2, 3), correction=0)
    return {
        "y": z.relu() if given.relu else z,
        "mean": x.detach().mean(dim=(0, 2, 3)),
        "rstd": (variance + EPS) ** -0.5,
        "unbiased": variance * rows / (rows - 1),
        "dx": dx,
        "dz": dz,
        "weight_gradient": weight_gradient,
        "bias_gradient": bias_gradient,
    }


def _allowed(given: Given, passes: Tensor, storage: Storage) -> dict[str, Tensor]:
    residual = 0.0 if given.residual is None else rows_of(given.residual)
    dz = rows_of(given.dy) * rows_of(passes)
    batch = Batch(
        rows_of(given.x), given.weight.double(), given.bias.double(), EPS, storage, residual, dz
    )
    bounds: Bounds = batch_norm_bounds(batch)
    rows = len(dz)
    return {
        "y": bounds.y,
        "mean": bounds.mean,
        "rstd": bounds.rstd,
        "unbiased": bounds.variance * rows / (rows - 1),
        "dx": bounds.dx,
        "dz": torch.zeros_like(dz),  # a copy with zeros, which is not rounded
        "weight_gradient": bounds.weight_gradient,
        "bias_gradient": bounds.bias_gradient,
    }


def rows_of(t: Tensor) -> Tensor:
    """Return a tensor [N, C, H, W] as [rows, C] in float64."""
    return t.detach().double().permute(0, 2, 3, 1).reshape(-1, t.shape[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
