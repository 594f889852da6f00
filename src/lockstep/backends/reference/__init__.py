"""Plain NumPy: the specification in code, and the baseline of every other engine.

The functions of `lockstep.backends.Backend`.
"""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from lockstep.backends import (
    World,
    refuse_cuda_graph,
    refuse_fused,
    refuse_horovod,
    refuse_layout,
    refuse_recompute,
)
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.backends.reference.measuring import libraries, products
from lockstep.backends.reference.model import Network
from lockstep.backends.reference.tracing import profile
from lockstep.launch.nodes import Start, Table
from lockstep.models.architectures import model_spec, tensors
from lockstep.models.state import check_fit
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError

__all__ = [
    "devices",
    "engine",
    "libraries",
    "load_module",
    "products",
    "profile",
    "starting",
    "world",
]


class ReferenceWorld:
    """A single process."""

    rank = 0
    ranks = 1
    on_gpu = False

    def __init__(self, execution: Execution) -> None:
        if execution.device == "cuda":
            raise BackendError("the reference engine computes on CPUs; leave device at auto")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise BackendError(_ALONE)
        refuse_horovod(execution.distributed)
        refuse_fused(execution.fused)
        refuse_layout(execution.layout, "nhwc")
        refuse_cuda_graph(execution.cuda_graph)
        refuse_recompute(execution.recompute)
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


_ALONE = "the reference engine runs in one process; use another --backend with `lockstep launch`"


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
    """Return a function of normalised images, float [N, 3, H, W], to logits, float64 [N, logits]."""
    check_fit(_shapes(recipe), tensors, "weights")
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}

    def module(images: np.ndarray) -> np.ndarray:
        return Network(recipe, weights, training=False).logits(
            images.transpose(0, 2, 3, 1).astype(np.float64)
        )[0]

    return module


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    return {
        tensor.name: tensor.shape for tensor in tensors(model_spec(recipe.model), recipe.logits)
    }


def devices() -> list[str]:
    """Return the processor."""
    return [f"CPU, NumPy on {platform.machine()}"]


def starting(table: Table, distributed: str) -> AbstractContextManager[Start]:
    """Raise `BackendError`: the reference engine has no ranks."""
    raise BackendError(_ALONE)
