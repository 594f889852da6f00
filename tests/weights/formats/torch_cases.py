"""Modules of PyTorch whose files the tests read and write."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.backends.torch.model import Model
from lockstep.models.architectures import model_spec
from lockstep.recipes import Recipe
from lockstep.weights import Weights
from lockstep.weights.formats.torch_models import read
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.peer_cases import logits

Tensors = dict[str, torch.Tensor]


def recipe_of(model: str = "small", logits: int = 5) -> Recipe:
    return Recipe(model=model, logits=logits, precision="fp32")


def module_of(model: str = "small", seed: int = 0) -> nn.Module:
    """Return a module with torchvision's names, and random tensors that differ."""
    torch.manual_seed(seed)
    module = Model(model_spec(model), recipe_of(model))
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            tensor.normal_()
    return module


class OfNvidia(nn.Module):
    """A module with NVIDIA's names and their order: `layers` in place of `layer1` to `layer4`, and
    `squeeze` after a block's shortcut in place of `se` before it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.conv1 = module.conv1
        self.bn1 = module.bn1
        self.layers = nn.Sequential(module.layer1, module.layer2, module.layer3, module.layer4)
        self.fc = module.fc
        for block in (block for stage in self.layers for block in stage if block.se is not None):
            block.squeeze = nn.Module()
            block.squeeze.squeeze = block.se.fc1
            block.squeeze.expand = block.se.fc2
            del block.se


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {
        name: tensor.float().numpy()
        for name, tensor in tensors.items()
        if not name.endswith("num_batches_tracked")
    }


def read_again(
    value: Any, folder: Path, name: str = "any.pth", *, momentum: bool = True
) -> Weights:
    torch.save(value, folder / name)
    return read(folder / name, momentum=momentum)


IMAGES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def read_value(value: Any, folder: Path, **chosen: Any) -> Weights:
    torch.save(value, folder / "any.pth")
    return read(folder / "any.pth", choice=WeightsChoice(**chosen))


def check_answers(weights: Weights, module: nn.Module) -> None:
    """Check that probabilities are those of a module that takes images from 0 to 1."""
    images = IMAGES.numpy()
    if "mean" in weights.stated:
        mean, std = np.array([weights.recipe.mean, weights.recipe.std], np.float32)[..., None, None]
        images = (255 * images - mean) / std
    ours = torch.from_numpy(logits(weights, images)).softmax(1)
    with torch.inference_mode():
        expected = module.eval()(IMAGES).softmax(1)
    assert (expected[0] != expected[1]).all()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def nvidias_groups(module: nn.Module) -> Any:
    named = list(module.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if "bn" in name], "weight_decay": 0},
        {
            "params": [parameter for name, parameter in named if "bn" not in name],
            "weight_decay": 1e-4,
        },
    ]


class Plain(nn.Module):
    """The network "basic" as torchvision's class has it, in evaluation. None of Lockstep's code
    computes it."""

    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(PlainBlock(8, 8, 1))
        self.layer2 = nn.Sequential(PlainBlock(8, 16, 2), PlainBlock(16, 16, 1))
        self.layer3 = nn.Sequential(PlainBlock(16, 32, 2))
        self.layer4 = nn.Sequential(PlainBlock(32, 64, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc: nn.Module = nn.Linear(64, outputs)
        for name, tensor in self.state_dict().items():
            if "running" in name or ("bn" in name and tensor.ndim):
                tensor.uniform_(0.5, 1.5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride == 2:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)
