"""Part: fused batch norms at every size of ResNet-50 against PyTorch's own: exactness, time, and
bytes over time.

A layer is measured forward and backward, on the device alone: the kernels of all batches of a turn
are captured in a graph.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import update_kernel
from benchmarks.gpu.kernel_errors import EPS, Given, largest_shares
from benchmarks.gpu.machine import copy_gb_per_sec
from benchmarks.gpu.timing import Ground, Say, median_ms
from lockstep.backends.torch.fused_batch_norm import activate, fuse
from lockstep.models.architectures import MODELS, ModelSpec, blocks, narrow_model, stem

PLAIN = "batch norm"
RELU = "batch norm, ReLU"
ADD_RELU = "batch norm, sum, ReLU"
PASSES = {PLAIN: (3, 5), RELU: (3, 5), ADD_RELU: (4, 7)}
"""How often a fused layer reads or writes its activations, forward and backward."""
PLAIN_PASSES = {PLAIN: (3, 5), RELU: (5, 8), ADD_RELU: (8, 8)}
"""The same of PyTorch's operators without a compiler, if batch norm's own kernels are as good."""
CACHE_BYTES = 2**28
"""Batches of a turn have more bytes than this together, a multiple of any GPU's cache, as the
layers between have."""
TILINGS = tuple(
    (rows, warps, programs)
    for rows in (32, 64, 128)
    for warps in (4, 8)
    for programs in (512, 1024)
)
TILED = 3
"""The tilings are measured at this many of the largest layers."""
LEAST_SEC = 20.0
"""What may be left out is not begun if fewer seconds are left."""


@dataclass(frozen=True)
class Layer:
    """A batch norm of a model."""

    kind: str
    channels: int
    side: int
    """Height and width in pixels."""


def layers_of(spec: ModelSpec, size: int) -> Counter[Layer]:
    """Return the batch norms of a model for images of a size, and how many there are of each."""
    side = -(-size // 2)
    found = Counter([Layer(RELU, stem(spec).outputs, side)])
    side = -(-side // 2)
    for block in blocks(spec):
        for conv in block.convs:
            side = -(-side // conv.stride)
            found[Layer(ADD_RELU if conv is block.convs[-1] else RELU, conv.outputs, side)] += 1
        if block.shortcut is not None:
            found[Layer(PLAIN, block.shortcut.outputs, side)] += 1
    return found


def measure(ground: Ground, say: Say) -> None:
    """Write a row for every layer, the ones that move most bytes first, one for the update, then
    one for each tiling."""
    if ground.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    copy = copy_gb_per_sec(ground)
    say({"what": "copy", "gb_per_sec": copy})
    spec, size, images = (
        (narrow_model(MODELS["resnet50"]), 16, 2) if ground.tiny else (MODELS["resnet50"], 224, 256)
    )
    dtype = torch.float32 if ground.tiny else torch.bfloat16
    layers = layers_of(spec, size)
    order = sorted(
        layers,
        key=lambda layer: -layers[layer] * sum(PASSES[layer.kind]) * layer.channels * layer.side**2,
    )
    for layer in {layer.kind: layer for layer in order}.values() if ground.tiny else order:
        row = {
            "what": "fused kernel",
            "kind": layer.kind,
            "channels": layer.channels,
            "side": layer.side,
        }
        row |= {"images": images, "type": str(dtype).removeprefix("torch."), "count": layers[layer]}
        say(row | _measured(layer, images, dtype, copy, ground))
    say({"what": "fused update"} | update_kernel.measured(ground))
    if not ground.tiny:
        for layer in order[:TILED]:
            for tiling in TILINGS:
                if ground.left_sec > LEAST_SEC:
                    say(_tiled(layer, images, dtype, tiling, ground))


def given(layer: Layer, images: int, dtype: torch.dtype, device: str) -> Given:
    """Return random tensors for a layer."""

    def drawn() -> Tensor:
        shape = images, layer.channels, layer.side, layer.side
        return torch.randn(shape, device=device, dtype=dtype).contiguous(
            memory_format=torch.channels_last
        )

    torch.manual_seed(0)
    weight = torch.rand(layer.channels, device=device) + 0.5
    bias = torch.randn(layer.channels, device=device)
    residual = drawn() if layer.kind == ADD_RELU else None
    return Given(1.5 * drawn() + 0.5, weight, bias, residual, drawn(), layer.kind != PLAIN)


def _measured(
    layer: Layer, images: int, dtype: torch.dtype, copy: float, ground: Ground
) -> dict[str, Any]:
    case = given(layer, images, dtype, ground.device)
    shares = largest_shares(case, results(_norm(layer, ground.device, fused=True), case))
    worst = max(shares, key=lambda name: shares[name])
    row: dict[str, Any] = {
        "passed": shares[worst] <= 1,
        "largest_share_of_a_bound": shares[worst],
        "of": worst,
    }
    contenders = [
        "fused",
        "plain",
        *(["compiled"] if ground.device == "cuda" and ground.left_sec > LEAST_SEC else []),
    ]
    for name in contenders:
        try:
            norm = _norm(layer, ground.device, fused=name == "fused")
            row[f"{name}_ms"] = _layer_ms(norm, case, ground, compiled=name == "compiled")
        except (
            Exception
        ) as error:  # too little memory, a compiler's own errors: the others are still measured
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:300]
    one = case.x.numel() * case.x.element_size()
    row |= {
        "bytes": sum(PASSES[layer.kind]) * one,
        "plain_bytes": sum(PLAIN_PASSES[layer.kind]) * one,
    }
    if "fused_ms" in row:
        row["share_of_copy"] = row["bytes"] / row["fused_ms"] / 1e6 / copy
    return row


def _norm(layer: Layer, device: str, *, fused: bool) -> nn.Module:
    holder = nn.Sequential(nn.BatchNorm2d(layer.channels, eps=EPS)).to(device)
    if fused:
        fuse(holder)
    return holder[0]


def forward(norm: nn.Module, x: Tensor, residual: Tensor | None, *, relu: bool) -> Tensor:
    """Return the result of a layer as the model computes it."""
    return activate(norm, x, residual) if relu else norm(x)


def results(norm: nn.Module, case: Given) -> dict[str, Tensor]:
    """Return the result of a layer and its gradients, by the names of `largest_shares`."""
    norm.get_parameter("weight").data.copy_(case.weight)
    norm.get_parameter("bias").data.copy_(case.bias)
    x = case.x.detach().requires_grad_()
    residual = None if case.residual is None else case.residual.detach().requires_grad_()
    y = forward(norm, x, residual, relu=case.relu)
    wanted = [
        x,
        norm.get_parameter("weight"),
        norm.get_parameter("bias"),
        *([] if residual is None else [residual]),
    ]
    names = ["dx", "weight_gradient", "bias_gradient", "dz"]
    gradients = torch.autograd.grad(y, wanted, case.dy)
    return {"y": y.detach(), **dict(zip(names, gradients, strict=False))}


def _layer_ms(norm: nn.Module, case: Given, ground: Ground, *, compiled: bool) -> float:
    """Return the milliseconds of a layer forward and backward."""
    batches = list(_batches(case, 1 if ground.tiny else None))

    def layer(x: Tensor, residual: Tensor | None) -> Tensor:
        return forward(norm, x, residual, relu=case.relu)

    if compiled:
        torch.compiler.reset()  # the compiler keeps few versions of a function
    computed = torch.compile(layer, dynamic=False) if compiled else layer

    def turn() -> None:
        found = [computed(x, residual) for x, residual, _ in batches]
        for y, (x, residual, dy) in zip(found, batches, strict=True):
            torch.autograd.grad(
                y, [x, *norm.parameters(), *([] if residual is None else [residual])], dy
            )

    return _turn_ms(turn, ground) / len(batches)


def _batches(case: Given, count: int | None) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yield leaves and the gradient of the result, for a batch at a time."""
    one = case.x.numel() * case.x.element_size()
    for _ in range(count or max(1, -(-CACHE_BYTES // one))):
        residual = (
            None if case.residual is None else case.residual.detach().clone().requires_grad_()
        )
        yield case.x.detach().clone().requires_grad_(), residual, case.dy.clone()


def _turn_ms(turn: Callable[[], None], ground: Ground) -> float:
    """Return the milliseconds of a turn; on a GPU replayed from a graph, without the host's time
    between kernels."""
    if ground.device != "cuda":
        return median_ms(turn, ground, 1, warmup=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            turn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    return median_ms(graph.replay, ground, 20)


def _tiled(
    layer: Layer, images: int, dtype: torch.dtype, tiling: tuple[int, int, int], ground: Ground
) -> dict[str, Any]:
    """Return the time of the kernels with another division of their work. The constants are chosen
    from these rows."""
    from lockstep.backends.torch.kernels import batch_norm as kernels

    case, (rows, warps, programs) = given(layer, images, dtype, ground.device), tiling
    how = kernels.Tiling(rows=rows, warps=warps, programs=programs)

    def turn() -> None:
        y, statistics = kernels.forward(
            case.x, case.residual, case.weight, case.bias, EPS, relu=case.relu, tiling=how
        )
        kept = None if case.residual is None else y
        kernels.backward(
            case.dy, case.x, kept, case.weight, case.bias, statistics, relu=case.relu, tiling=how
        )

    row = {"what": "tiling", "kind": layer.kind, "channels": layer.channels, "side": layer.side}
    row |= {"rows": rows, "warps": warps, "programs": programs}
    try:
        return row | {"fused_ms": _turn_ms(turn, ground)}
    except Exception as error:  # such as too few registers
        return row | {"fused_failed": f"{type(error).__name__}: {error}"[:300]}
