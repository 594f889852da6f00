"""Plain NumPy: the specification in code, and the baseline of every other engine.

The functions of `lockstep.backends.Backend`.
"""

import platform
from collections.abc import Callable

import numpy as np

from lockstep.backends import World
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.backends.reference.measuring import libraries, products
from lockstep.backends.reference.model import Network
from lockstep.backends.reference.tracing import profile
from lockstep.models import architectures
from lockstep.models.state import check_fit
from lockstep.recipes import Execution, Recipe


class ReferenceWorld:
    """A single process."""

    rank = 0
    ranks = 1
    on_gpu = False

    def __init__(self, execution: Execution) -> None:
        self.device = f"{devices()[0]}, {execution.reference_dtype}"

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def same(self, value: int) -> bool:
        """Return True, since there is only one rank."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


def world(execution: Execution) -> ReferenceWorld:
    """Return this process."""
    return ReferenceWorld(execution)


def engine(
    recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution
) -> ReferenceEngine:
    """Return an engine for the recipe's model."""
    return ReferenceEngine(recipe, learning_rates, world, execution)


def load_module(
    recipe: Recipe, tensors: dict[str, np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of normalised images [N, 3, H, W] to logits, float64 [N, logits]."""
    table = architectures.tensors(architectures.model_spec(recipe.model), recipe.logits)
    check_fit({tensor.name: tensor.shape for tensor in table}, tensors, "weights")
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}

    def compute(images: np.ndarray) -> np.ndarray:
        network = Network(recipe, weights, training=False)
        return network.logits(images.transpose(0, 2, 3, 1).astype(np.float64))[0]

    return compute


def devices() -> list[str]:
    """Return the processor."""
    return [f"CPU, NumPy on {platform.machine()}"]
