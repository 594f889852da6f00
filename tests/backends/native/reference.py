from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np

from lockstep.data import Batch
from tests.backends.native import Facts, Groups

FACTS = Facts(
    step="_gradients", reason="Unable to allocate", logits=np.float64, compiles_quickly=True
)


def find_obstacle(precision: str) -> str | None:
    return None


def images(normalised: np.ndarray) -> np.ndarray:
    return normalised.transpose(0, 3, 1, 2)


def array(logits: np.ndarray) -> np.ndarray:
    return logits


def exhaust_host(*_: object) -> np.ndarray:
    return np.empty(2**50)


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step by the formula, in which the velocity is the gradient."""
    return [weight - rate * (1 + momentum) * gradient for weight, gradient, rate in groups]


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    package = type(engine).__module__.rpartition(".")[0]  # a copy of the backend has its own
    functions = import_module(f"{package}.functions")
    convolve = functions.convolution
    count = 0

    def count_back(*arguments: Any, **named: Any) -> Any:
        y, back = convolve(*arguments, **named)

        def counted(d_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal count
            count += 1
            return back(d_y)

        return y, counted

    with patch.object(functions, "convolution", count_back):
        engine.train([batch], 0)
    return count
