"""Rows of `MODELS` compute what timm's functions of these names compute.

`Timm` is timm's class with the arguments of these functions, in plain PyTorch. Its logits were
compared with those of timm 1.0.31: they were equal, bit by bit.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.torch.model import Model
from lockstep.models.architectures import MODELS, NO_SQUEEZE
from lockstep.recipes import Recipe

D: dict[str, Any] = {"stem_width": 32, "stem_type": "deep", "avg_down": True}
T: dict[str, Any] = D | {"stem_type": "deep_tiered"}
C: dict[str, Any] = {"stem_width": 32, "stem_type": "deep"}
S: dict[str, Any] = {"stem_width": 64, "stem_type": "deep"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "resnet200": {"layers": (3, 24, 36, 3)},
    "resnet50t": {"layers": (3, 4, 6, 3), **T},
    "resnet50c": {"layers": (3, 4, 6, 3), **C},
    "resnet101c": {"layers": (3, 4, 23, 3), **C},
    "resnet152c": {"layers": (3, 8, 36, 3), **C},
    "resnet50s": {"layers": (3, 4, 6, 3), **S},
    "resnet101s": {"layers": (3, 4, 23, 3), **S},
    "resnet152s": {"layers": (3, 8, 36, 3), **S},
    "seresnet18": {"layers": (2, 2, 2, 2), "basic": True, "se": True},
    "seresnet34": {"layers": (3, 4, 6, 3), "basic": True, "se": True},
    "seresnet101": {"layers": (3, 4, 23, 3), "se": True},
    "seresnet152": {"layers": (3, 8, 36, 3), "se": True},
    "seresnet50t": {"layers": (3, 4, 6, 3), **T, "se": True},
    "seresnet200d": {"layers": (3, 24, 36, 3), **D, "se": True},
    "seresnet269d": {"layers": (3, 30, 48, 8), **D, "se": True},
    "resnetblur18": {"layers": (2, 2, 2, 2), "basic": True, "blur": True},
    "resnetblur50d": {"layers": (3, 4, 6, 3), **D, "blur": True},
    "resnetblur101d": {"layers": (3, 4, 23, 3), **D, "blur": True},
}
"""What timm's functions pass to its class."""


class Blur(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        line = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype)
        filters = (line[:, None] * line).repeat(x.shape[1], 1, 1, 1)
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), filters, stride=2, groups=x.shape[1])


def hidden_channels(channels: int) -> int:
    """Return a sixteenth as the nearest multiple of 8."""
    return max(8, (channels // 16 + 4) // 8 * 8)


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden_channels(channels), 1)
        self.fc2 = nn.Conv2d(hidden_channels(channels), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, arguments: dict[str, Any]) -> None:
        super().__init__()
        is_basic = arguments.get("basic", False)
        outputs = width if is_basic else 4 * width
        blurs = arguments.get("blur", False) and stride == 2
        kernels = (3, 3) if is_basic else (1, 3, 1)
        self.strided = 0 if is_basic else 1
        channels = [inputs, *[width] * (len(kernels) - 1), outputs]
        for i, kernel in enumerate(kernels):
            step = stride if i == self.strided and not blurs else 1
            self.add_module(f"conv{i + 1}", conv(channels[i], channels[i + 1], kernel, step))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(channels[i + 1]))
        self.depth = len(kernels)
        self.aa = Blur() if blurs else nn.Identity()
        self.se = Squeeze(outputs) if arguments.get("se") else nn.Identity()
        self.downsample: nn.Module = nn.Identity()
        if arguments.get("avg_down") and (stride != 1 or inputs != outputs):
            pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)
            first = pool if stride == 2 else nn.Identity()
            self.downsample = nn.Sequential(
                first, conv(inputs, outputs, 1), nn.BatchNorm2d(outputs)
            )
        elif stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        for i in range(1, self.depth + 1):
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
            if i < self.depth:
                x = x.relu()
            if i - 1 == self.strided and i < self.depth:
                x = self.aa(x)
        return (self.se(x) + shortcut).relu()


class Timm(nn.Module):
    def __init__(self, arguments: dict[str, Any], channels: tuple[int, ...]) -> None:
        super().__init__()
        width = arguments.get("stem_width", 64)
        stem = 64
        self.conv1: nn.Module = nn.Conv2d(3, stem, 7, 2, 3, bias=False)
        if "stem_type" in arguments:
            stem = 2 * width
            first = 3 * width // 4 if "tiered" in arguments["stem_type"] else width
            self.conv1 = nn.Sequential(
                *(conv(3, first, 3, 2), nn.BatchNorm2d(first), nn.ReLU()),
                *(conv(first, width, 3), nn.BatchNorm2d(width), nn.ReLU()),
                conv(width, stem, 3),
            )
        self.bn1 = nn.BatchNorm2d(stem)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        if arguments.get("blur"):
            self.maxpool = nn.Sequential(nn.MaxPool2d(3, 1, 1), Blur())
        inputs = stem
        for i, (layers, wide) in enumerate(zip(arguments["layers"], channels, strict=True)):
            blocks = []
            for number in range(layers):
                stride = 2 if i > 0 and number == 0 else 1
                blocks.append(Block(inputs, wide, stride, arguments))
                inputs = wide if arguments.get("basic") else 4 * wide
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(x.mean((2, 3)))


def list_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            yield name, tuple(tensor.shape)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_row_has_the_tensors_of_timms_function(name: str) -> None:
    with torch.device("meta"):
        expected = list(list_tensors(Timm(ARGUMENTS[name], (64, 128, 256, 512))))
    assert [(t.name, t.shape) for t in MODELS[name].list_tensors(10)] == expected


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_row_computes_the_logits_of_timms_function(name: str) -> None:
    spec = MODELS[name]
    width = 64
    arguments = ARGUMENTS[name] | {"layers": (2, 1, 1, 1)}
    if "stem_type" in arguments:
        arguments["stem_width"] = 8
        width = 16
    channels = (8, 16, 16, 32)
    squeezes = NO_SQUEEZE
    if "se" in arguments:
        squeezes = tuple(hidden_channels(wide * spec.expansion) for wide in channels)
    torch.manual_seed(0)
    theirs = Timm(arguments, channels).double().eval()
    for tensor in filter(torch.is_floating_point, theirs.state_dict().values()):
        tensor.uniform_(-1 if tensor.ndim > 1 else 0.5, 1.5)
    narrow = replace(
        spec, layers=(2, 1, 1, 1), widths=channels, stem_width=width, squeeze_widths=squeezes
    )
    ours = Model(narrow, Recipe(model=narrow, logits=10)).double().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 45, 45, dtype=torch.float64)
    with torch.inference_mode():
        expected = theirs(images)
        torch.testing.assert_close(ours(images), expected, rtol=1e-9, atol=0)
    assert (expected[0] != expected[1]).all(), "of the biases alone"
