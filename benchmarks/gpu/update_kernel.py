"""The update of all tensors of ResNet-50 by Lockstep's kernels against PyTorch's operators:
rounding, and time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.timing import Ground, median_ms
from lockstep.backends.torch.engine import canonical_tensors
from lockstep.backends.torch.model import Model
from lockstep.backends.torch.step_graph import WARM_UP, CudaCapturer, StepGraph
from lockstep.backends.torch.updating import Update
from lockstep.models.architectures import MODELS, ModelSpec, model_spec
from lockstep.recipes import Recipe

TINY = ModelSpec(block="basic", layers=(1, 1, 1, 1), stem_width=4, widths=(4, 4, 4, 8), expansion=1)
STEPS = WARM_UP + 2
"""With a captured one, and one that is replayed."""
ROUNDINGS = 8 * STEPS
"""How many roundings of float32 the two may differ by: PyTorch's operators may contract products
and sums."""
MOST_STEPS = 10_000


def measured(ground: Ground) -> dict[str, Any]:
    """Return whether both end alike, in fp16 with dynamic scaling and moving averages, and the
    milliseconds of an update.

    On a GPU an update is replayed from a graph, without the host's time. Each includes a product
    that makes the gradients.
    """
    spec = TINY if ground.tiny else MODELS["resnet50"]
    recipe = Recipe(
        model=spec, precision="fp16", loss_scaling="dynamic", ema_decay=0.999, nesterov=True
    )
    ends: list[list[Tensor]] = []
    row: dict[str, Any] = {}
    for name in ("plain", "fused"):
        found, ms = _stepped(recipe, ground, is_fused=name == "fused")
        ends.append(found)
        row[f"{name}_ms"] = ms
    off = [
        ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()
        for a, b in zip(*ends, strict=True)
    ]
    return row | {
        "largest_difference": max(off),
        "passed": max(off) <= ROUNDINGS * float(np.finfo(np.float32).eps),
    }


def _stepped(recipe: Recipe, ground: Ground, *, is_fused: bool) -> tuple[list[Tensor], float]:
    """Return copies of all tensors after some updates with the same gradients, and the milliseconds
    of another one."""
    device = torch.device(ground.device)
    torch.manual_seed(0)
    model = Model(model_spec(recipe.model), recipe).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = dict(model.named_parameters())
    tensors = canonical_tensors(model)
    gradients = [
        torch.empty_like(each).copy_(torch.randn(each.shape)) for each in parameters.values()
    ]
    update = Update(
        recipe, parameters, tensors, np.full(MOST_STEPS, 1e-3), device, is_fused=is_fused
    )

    def take(columns: Sequence[Tensor]) -> Tensor:
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient * columns[0]
        update.take(is_captured=graph.is_capturing)
        return columns[0]

    capturer = CudaCapturer(device) if ground.device == "cuda" else None
    graph = StepGraph(take, capturer, update.finish_capture)
    one = [torch.ones((), device=device)]
    for _ in range(2 if ground.tiny else STEPS):
        graph(one)
    found = [
        each.detach().clone()
        for kind in (tensors, update.velocity, update.ema)
        for each in kind.values()
    ]
    return found, median_ms(lambda: graph(one), ground, 1 if ground.tiny else 20, warmup=0)
