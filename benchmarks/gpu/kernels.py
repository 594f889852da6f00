"""Fused batch norms at every size of ResNet-50 against PyTorch's own: errors, and times forward and
backward. On a GPU, times are of the device alone."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from benchmarks.gpu.rows import Rows, measure_ms, print_rows
from lockstep.backends.torch.fused_batch_norm import activate, fuse
from lockstep.benchmark.ceilings import copy_gb_per_sec
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from tests.backends.kernels import errors

PASSES = {errors.PLAIN: (3, 5), errors.RELU: (3, 5), errors.ADD_RELU: (4, 7)}
"""How often a fused layer reads or writes its activations, forward and backward."""
RESULTS = ("y", "dx", "weight_gradient", "bias_gradient", "dz")


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
    layers = Counter([Layer(errors.RELU, spec.list_stem()[-1].outputs, side)])
    side = -(-side // 2)
    for block in spec.list_blocks():
        for conv in block.convs:
            side = -(-side // conv.stride)
            kind = errors.ADD_RELU if conv is block.convs[-1] else errors.RELU
            layers[Layer(kind, conv.outputs, side)] += 1
        if block.shortcut is not None:
            layers[Layer(errors.PLAIN, block.shortcut.outputs, side)] += 1
    return layers


def measure(device: str, tiny: bool = False) -> Rows:
    """Yield a row for every layer; if tiny, for one of every kind."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    copy = copy_gb_per_sec("torch", on_gpu=device == "cuda", ranks=1)
    images = 256
    dtype = torch.bfloat16
    counts = count_layers(MODELS["resnet50"], 224)
    contenders = ["fused", "plain", "compiled"]
    if tiny:
        images = 2
        dtype = torch.float32
        counts = count_layers(narrow_model(MODELS["resnet50"]), 16)
        counts = Counter({layer.kind: layer for layer in counts}.values())
        contenders.remove("compiled")
    for layer, count in counts.items():
        shape = (images, layer.channels, layer.side, layer.side)
        case = errors.draw_case(shape, layer.kind, dtype, device)
        row = {"what": "fused kernel", "count": count} | asdict(layer)
        results = zip(RESULTS, _make_turn(case, device, "fused")(), strict=False)
        shares = errors.largest_shares(case, dict(results))
        worst = max(shares, key=lambda name: shares[name])
        row |= {"largest_share_of_a_bound": shares[worst], "of": worst}
        row["passed"] = shares[worst] <= 1
        for name in contenders:
            try:
                row[f"{name}_ms"] = _measure_turn_ms(_make_turn(case, device, name), device)
            except Exception as error:  # too little memory, or a compiler's own errors
                row[f"{name}_failed"] = f"{type(error).__name__}: {error!s:.300}"
        moved = sum(PASSES[layer.kind]) * case.x.numel() * case.x.element_size()
        if "fused_ms" in row:
            row["share_of_copy"] = moved / row["fused_ms"] / 1e6 / copy
        yield row


def _make_turn(case: errors.Case, device: str, contender: str) -> Callable[[], list[Tensor]]:
    """Return a function that computes a layer and its gradients, in the order of `RESULTS`."""
    holder = nn.Sequential(nn.BatchNorm2d(len(case.weight), eps=errors.EPS)).to(device)
    if contender == "fused":
        fuse(holder)
    norm = holder[0]
    weight, bias = norm.parameters()
    weight.data.copy_(case.weight)
    bias.data.copy_(case.bias)
    tensors = [case.x] if case.residual is None else [case.x, case.residual]
    x, *residual = [tensor.detach().clone().requires_grad_() for tensor in tensors]

    def layer(x: Tensor, *residual: Tensor) -> Tensor:
        return activate(norm, x, *residual) if case.relu else norm(x)

    torch.compiler.reset()  # the compiler keeps few versions of a function
    run = torch.compile(layer, dynamic=False) if contender == "compiled" else layer

    def turn() -> list[Tensor]:
        y = run(x, *residual)
        return [y.detach(), *torch.autograd.grad(y, [x, weight, bias, *residual], case.dy)]

    return turn


def _measure_turn_ms(turn: Callable[[], object], device: str) -> float:
    if device == "cpu":
        return measure_ms(turn, device)
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(turn))


if __name__ == "__main__":
    print_rows(measure)
