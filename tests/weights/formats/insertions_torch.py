"""Modules to insert into a network of PyTorch at the places of `tests.edges`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.edges import Place
from tests.weights.formats.torch_cases import Plain


class Normalise(nn.Module):
    def __init__(self, name: str = "", *, scale: float = 1) -> None:
        super().__init__()
        for kind, values in {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}.items():
            self.register_buffer(f"{name}{kind}", scale * torch.tensor(values)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.buffers()
        return (x - mean) / std


class Constant(nn.Module):
    """Divides by a tensor, such as a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.temperature


INSERTED: dict[str, Callable[[int], nn.Module]] = {
    "sigmoid": lambda size: nn.Sigmoid(),
    "tanh": lambda size: nn.Tanh(),
    "relu": lambda size: nn.ReLU(),
    "gelu": lambda size: nn.GELU(),
    "softplus": lambda size: nn.Softplus(),
    "softmax": lambda size: nn.Softmax(1),
    "log softmax": lambda size: nn.LogSoftmax(1),
    "dropout": lambda size: nn.Dropout(),
    "identity": lambda size: nn.Identity(),
    "layer norm": lambda size: nn.LayerNorm([]),
    "instance norm": lambda size: nn.InstanceNorm2d(size),
    "max pool": lambda size: nn.MaxPool2d(3, 1, 1),
    "average pool": lambda size: nn.AvgPool2d(3, 1, 1),
    "padding": lambda size: nn.ZeroPad2d(1),
    "batch norm": lambda size: nn.BatchNorm2d(size),
    "batch norm of features": lambda size: nn.BatchNorm1d(size),
    "group norm": lambda size: nn.GroupNorm(1, size),
    "prelu": lambda size: nn.PReLU(),
    "convolution": lambda size: nn.Conv2d(size, size, 1),
    "linear": lambda size: nn.Linear(size, size),
    "embedding": lambda size: nn.Embedding(size, size),
    "temperature": lambda size: Constant(),
    "normalisation": lambda size: Normalise(),
}


def insert(module: nn.Module, place: Place) -> nn.Module:
    """Return a network with another module at a place."""
    network = Plain()
    if place == "before the stem":
        return nn.Sequential(module, network)
    if place == "between blocks":
        network.layer2.append(module)
    elif place == "before the classifier":
        network.fc = nn.Sequential(module, network.fc)
    else:
        return nn.Sequential(network, module)
    return network
