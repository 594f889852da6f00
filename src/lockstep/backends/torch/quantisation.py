"""Convolution and classifier with weights and input rounded to int8, by the rules of
`lockstep.models.quantisation`.

PyTorch's own `fake_quantize_per_tensor_affine` multiplies by the reciprocal of the scale, where
ONNX's QuantizeLinear divides, and turns NaN into a finite number, which would hide that a run
diverges.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.torch.padding import same_padding
from lockstep.models.quantisation import LARGEST, LOWEST, SMALLEST_SCALE


class _FakeQuantised(torch.autograd.Function):
    """Float32 x to int8 multiples of the scale. The gradient passes where x is within the limits of
    the integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        q = torch.round(x / scale)
        limited = q.clamp(LOWEST, LARGEST)
        ctx.save_for_backward(q == limited)
        return limited * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (is_within,) = ctx.saved_tensors
        return gradient * is_within, None


class _FakeQuantisedWeight(torch.autograd.Function):
    """A float32 weight to int8 multiples of a scale for each output channel. All of its gradient
    passes: none is limited."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        largest = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True)
        scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
        # With the strides of the weight, which its gradient then has, too: the exchange with other
        # ranks expects them.
        return torch.empty_like(weight).copy_(torch.round(weight / scale) * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def fake_quantise(x: Tensor, scale: Tensor) -> Tensor:
    """Return x rounded to int8 multiples of the scale, float32; `scale` is float32 and is
    broadcast."""
    result: Tensor = _FakeQuantised.apply(x.float(), scale)  # type: ignore[no-untyped-call]
    return result


def quantise_weight(weight: Tensor) -> Tensor:
    """Return a weight rounded to int8 multiples of a scale for each output channel."""
    result: Tensor = _FakeQuantisedWeight.apply(weight)  # type: ignore[no-untyped-call]
    return result


class QuantisedConv(nn.Conv2d):
    """A convolution whose weight and input are quantised. `scale`, float32 [], is that of its
    input."""

    scale: Tensor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the quantised input [N, C, H, W]."""
        return self._conv_forward(
            fake_quantise(self.pad(input), self.scale), quantise_weight(self.weight), None
        )

    def pad(self, input: Tensor) -> Tensor:
        """Return the input as the convolution expects it, with zeros around it if its own padding
        is not symmetric."""
        return input


class SameQuantisedConv(QuantisedConv):
    """A quantised convolution with TensorFlow's SAME padding."""

    def pad(self, input: Tensor) -> Tensor:
        """Return the input with zeros around it."""
        return F.pad(input, same_padding(input, self.kernel_size[0], self.stride[0]))


class QuantisedLinear(nn.Linear):
    """A classifier with quantised weight and input. `scale`, float32 [], is that of its input."""

    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of the quantised input [N, C]."""
        return F.linear(fake_quantise(input, self.scale), quantise_weight(self.weight), self.bias)


def set_scales(model: nn.Module, scales: Mapping[str, float]) -> None:
    """Set the scales of the inputs of a model's quantised layers, by their names."""
    for name, scale in scales.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantisedConv | QuantisedLinear)
        layer.scale.fill_(scale)


def largest_inputs(
    model: nn.Module, names: Iterable[str], batches: Iterable[Tensor]
) -> dict[str, float]:
    """Return the largest magnitude of the input of every named layer, while the model computes
    batches [N, 3, H, W]."""
    device = next(model.parameters()).device
    largest = {name: torch.zeros((), device=device) for name in names}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = torch.maximum(largest[name], inputs[0].abs().amax().float())

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in largest]
    for images in batches:
        model(images)
    for handle in handles:
        handle.remove()
    return {name: float(value) for name, value in largest.items()}
