"""Errors of a fused batch norm as shares of their bounds, against PyTorch's batch norm and autograd
in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backends.kernels.bounds import STORAGE, Batch, Bounds, Storage, batch_norm_bounds

EPS = 1e-5
PLAIN = "batch norm"
RELU = "batch norm, ReLU"
ADD_RELU = "batch norm, sum, ReLU"
MOST_VALUES = 2**25
"""At most this many values of a tensor are compared at a time, so that float64 fits into memory."""


@dataclass(frozen=True)
class Case:
    """What a batch norm computes with, and the gradient of its result."""

    x: Tensor
    """[N, C, H, W], as `residual` and `dy`."""
    weight: Tensor
    bias: Tensor
    residual: Tensor | None
    dy: Tensor
    relu: bool

    def select(self, channels: slice) -> "Case":
        """Return some channels alone."""
        residual = None if self.residual is None else self.residual[:, channels]
        parts = {"x": self.x[:, channels], "dy": self.dy[:, channels], "residual": residual}
        return replace(self, weight=self.weight[channels], bias=self.bias[channels], **parts)


def draw_case(shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str) -> Case:
    """Return a case of a kind of layer for activations [N, C, H, W]."""
    torch.manual_seed(0)

    def draw_inputs() -> Tensor:
        values = torch.randn(shape, device=device).to(dtype)
        return values.contiguous(memory_format=torch.channels_last)

    spread = torch.rand(shape[1], device=device) + 0.5
    level = torch.randn(shape[1], device=device)
    x = draw_inputs() * spread.view(1, -1, 1, 1).to(dtype) + level.view(1, -1, 1, 1).to(dtype)
    weight = torch.randn(shape[1], device=device)
    bias = torch.randn(shape[1], device=device) / 2
    residual = draw_inputs() if kind == ADD_RELU else None
    return Case(x, weight, bias, residual, draw_inputs(), kind != PLAIN)


def largest_shares(
    case: Case, results: Mapping[str, Tensor], storage: Storage | None = None
) -> dict[str, float]:
    """Return the largest error of each result as a share of its bound: at most 1 if rounding
    explains it.

    The results are named y, dx, weight_gradient, bias_gradient, mean, rstd (1 / deviation),
    unbiased (variance), and with a residual dz, its gradient. What is not in `results` is not
    compared. `storage` is that of the type by default.
    """
    storage = storage or STORAGE[str(case.x.dtype).removeprefix("torch.")]
    channels = case.x.shape[1]
    width = max(MOST_VALUES * channels // case.x.numel(), 1)
    largest: dict[str, float] = {}
    for first in range(0, channels, width):
        some = slice(first, first + width)
        part = {}
        for name, value in results.items():
            part[name] = value[:, some] if value.dim() == 4 else value[some]
        for name, share in _compute_shares(case.select(some), part, storage).items():
            largest[name] = max(share, largest.get(name, 0.0))
    return largest


def _compute_shares(
    case: Case, results: Mapping[str, Tensor], storage: Storage
) -> dict[str, float]:
    # Rounding decides the sign of what is almost 0, so ReLU's gradient passes where the result is
    # positive.
    passes = results["y"] > 0 if case.relu else torch.ones_like(results["y"], dtype=torch.bool)
    right = _compute_reference(case, passes)
    bounds = _compute_bounds(case, passes, storage)
    shares = {}
    for name in results.keys() & right.keys():
        off = (results[name].double() - right[name]).abs()
        if off.dim() == 4:
            off = flatten_rows(off)
        share = torch.where(off == 0, 0.0, off / bounds[name])
        shares[name] = float(share.nan_to_num(torch.inf).max())
    return shares


def _compute_reference(case: Case, passes: Tensor) -> dict[str, Tensor]:
    x = case.x.detach().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    bias = case.bias.detach().double().requires_grad_()
    norm = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    z = norm if case.residual is None else norm + case.residual.double()
    dz = case.dy.double() * passes
    dx, weight_gradient, bias_gradient = torch.autograd.grad(z, [x, weight, bias], dz)
    z = z.detach()
    rows = x.numel() // x.shape[1]
    variance = x.detach().var(dim=(0, 2, 3), correction=0)
    return {
        "y": z.relu() if case.relu else z,
        "mean": x.detach().mean(dim=(0, 2, 3)),
        "rstd": (variance + EPS) ** -0.5,
        "unbiased": variance * rows / (rows - 1),
        "dx": dx,
        "dz": dz,
        "weight_gradient": weight_gradient,
        "bias_gradient": bias_gradient,
    }


def _compute_bounds(case: Case, passes: Tensor, storage: Storage) -> dict[str, Tensor]:
    residual = 0.0 if case.residual is None else flatten_rows(case.residual)
    dz = flatten_rows(case.dy) * flatten_rows(passes)
    x = flatten_rows(case.x)
    batch = Batch(x, case.weight.double(), case.bias.double(), EPS, storage, residual, dz)
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


def flatten_rows(t: Tensor) -> Tensor:
    """Return a tensor [N, C, H, W] as [rows, C] in float64."""
    return t.detach().double().permute(0, 2, 3, 1).reshape(-1, t.shape[1])
