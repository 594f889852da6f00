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


def nvidias_groups(module: nn.Module) -> Any:
    named = list(module.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if "bn" in name], "weight_decay": 0},
        {
            "params": [parameter for name, parameter in named if "bn" not in name],
            "weight_decay": 1e-4,
        },
    ]
