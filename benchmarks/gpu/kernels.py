"""Fused batch norms at every size of ResNet-50 against PyTorch's own: errors, and times forward and
backward. On a GPU, times are of the device alone."""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.steps import Rows, measure_ms, print_rows
from lockstep.backends.torch.fused_batch_norm import activate, fuse
from lockstep.benchmark.ceilings import copy_gb_per_sec
from lockstep.models.architectures import MODELS, ModelSpec, blocks, narrow_model, stem
from tests.backends.kernels.errors import EPS, Case, largest_shares

PLAIN = "batch norm"
RELU = "batch norm, ReLU"
ADD_RELU = "batch norm, sum, ReLU"
PASSES = {PLAIN: (3, 5), RELU: (3, 5), ADD_RELU: (4, 7)}
"""How often a fused layer reads or writes its activations, forward and backward."""


@dataclass(frozen=True)
class Layer:
    """A batch norm of a model."""

    kind: str
    channels: int
    side: int
    """Height and width in pixels."""


def count_layers(spec: ModelSpec, size: int) -> Counter[Layer]:
    """Return the batch norms of a model for images of a size, and how many there are of each."""
    side = -(-size // 2)
    layers = Counter([Layer(RELU, stem(spec).outputs, side)])
    side = -(-side // 2)
    for block in blocks(spec):
        for conv in block.convs:
            side = -(-side // conv.stride)
            layers[Layer(ADD_RELU if conv is block.convs[-1] else RELU, conv.outputs, side)] += 1
        if block.shortcut is not None:
            layers[Layer(PLAIN, block.shortcut.outputs, side)] += 1
    return layers


def measure(device: str, tiny: bool = False) -> Rows:
    """Yield a row for every layer; if tiny, for one of every kind."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    copy = copy_gb_per_sec("torch", on_gpu=device == "cuda", ranks=1)
    layers = count_layers(MODELS["resnet50"], 224)
    if tiny:
        layers = count_layers(narrow_model(MODELS["resnet50"]), 16)
    for layer in {layer.kind: layer for layer in layers}.values() if tiny else layers:
        case = _draw_case(
            layer, 2 if tiny else 256, torch.float32 if tiny else torch.bfloat16, device
        )
        row = {"what": "fused kernel", "kind": layer.kind, "channels": layer.channels}
        row |= {"side": layer.side, "count": layers[layer]} | _measure_errors(case, device)
        for name in ("fused", "plain") if tiny else ("fused", "plain", "compiled"):
            try:
                row[f"{name}_ms"] = _measure_case_ms(case, device, name)
            except Exception as error:  # too little memory, or a compiler's own errors
                row[f"{name}_failed"] = f"{type(error).__name__}: {error!s:.300}"
        moved = sum(PASSES[layer.kind]) * case.x.numel() * case.x.element_size()
        if "fused_ms" in row:
            row["share_of_copy"] = moved / row["fused_ms"] / 1e6 / copy
        yield row


def _draw_case(layer: Layer, images: int, dtype: torch.dtype, device: str) -> Case:
    def draw() -> Tensor:
        shape = (images, layer.channels, layer.side, layer.side)
        values = torch.randn(shape, device=device, dtype=dtype)
        return values.contiguous(memory_format=torch.channels_last)

    torch.manual_seed(0)
    weight = torch.rand(layer.channels, device=device) + 0.5
    bias = torch.randn(layer.channels, device=device)
    residual = draw() if layer.kind == ADD_RELU else None
    return Case(1.5 * draw() + 0.5, weight, bias, residual, draw(), layer.kind != PLAIN)


def _make_norm(case: Case, device: str, *, is_fused: bool) -> nn.Module:
    holder = nn.Sequential(nn.BatchNorm2d(len(case.weight), eps=EPS)).to(device)
    if is_fused:
        fuse(holder)
    holder[0].get_parameter("weight").data.copy_(case.weight)
    holder[0].get_parameter("bias").data.copy_(case.bias)
    return holder[0]


def _make_leaves(case: Case) -> list[Tensor]:
    """Return copies of the activations: x, and the residual if there is one."""
    tensors = [case.x] if case.residual is None else [case.x, case.residual]
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _measure_errors(case: Case, device: str) -> dict[str, Any]:
    norm = _make_norm(case, device, is_fused=True)
    x, *residual = _make_leaves(case)
    y = activate(norm, x, *residual) if case.relu else norm(x)
    inputs = [x, norm.get_parameter("weight"), norm.get_parameter("bias"), *residual]
    gradients = torch.autograd.grad(y, inputs, case.dy)
    names = ["dx", "weight_gradient", "bias_gradient", "dz"]
    results = {"y": y.detach(), **dict(zip(names, gradients, strict=False))}
    shares = largest_shares(case, results)
    worst = max(shares, key=lambda name: shares[name])
    return {"passed": shares[worst] <= 1, "largest_share_of_a_bound": shares[worst], "of": worst}


def _measure_case_ms(case: Case, device: str, contender: str) -> float:
    norm = _make_norm(case, device, is_fused=contender == "fused")
    leaves = _make_leaves(case)

    def layer(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return activate(norm, x, residual) if case.relu else norm(x)

    torch.compiler.reset()  # the compiler keeps few versions of a function
    run = torch.compile(layer, dynamic=False) if contender == "compiled" else layer

    def turn() -> None:
        torch.autograd.grad(run(*leaves), [*leaves, *norm.parameters()], case.dy)

    if device == "cpu":
        return measure_ms(turn, device, 1, warmup=0)
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(turn))


if __name__ == "__main__":
    print_rows(measure)
