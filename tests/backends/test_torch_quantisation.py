"""Tests for the layers of PyTorch's engine in int8, against PyTorch's own functions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.backends.torch.quantisation import QuantisedConv, QuantisedLinear

SCALE = 2.0**-6
"""A power of two, whose reciprocal is exact, so that PyTorch's functions round as a division does.
127 of it are 1.98."""


def round_to_int8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the weight of a layer as PyTorch's own functions round them."""
    scales = weight.detach().abs().flatten(1).amax(dim=1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
    return torch.fake_quantize_per_tensor_affine(x, SCALE, 0, -128, 127), rounded


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (
            QuantisedConv(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
            (2, 4, 5, 5),
            lambda x, weight, bias: F.conv2d(x, weight, None, 2, 1, 1, 2),
        ),
        (QuantisedLinear(4, 6), (3, 4), F.linear),
    ],
    ids=["convolution", "classifier"],
)
def test_a_layer_is_that_of_pytorch(layer: Any, shape: tuple[int, ...], expected: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    layer.scale.fill_(SCALE)
    layer.weight.data = torch.randn(layer.weight.shape, generator=generator)
    # Halves of a scale, and values beyond the limits on both sides.
    x = torch.randint(-300, 300, shape, generator=generator).float() * (SCALE / 2)
    x[0] *= 2
    x.requires_grad_()
    wanted = expected(*round_to_int8(x, layer.weight), layer.bias)
    result = layer(x)
    down = torch.randn(wanted.shape, generator=generator)
    assert torch.equal(result, wanted)
    for ours, theirs in zip(
        *(torch.autograd.grad(y, [x, layer.weight], down) for y in (result, wanted)), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert (torch.autograd.grad(layer(x), x, down)[0] == 0).any(), "some values must be limited"
