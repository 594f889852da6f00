"""Plain NumPy: the specification in code, and the baseline of every other engine.

The functions of `lockstep.backends.Backend`: `world` and `engine` are classes.
"""

from collections.abc import Callable

import numpy as np

from lockstep.backends.reference.engine import ReferenceEngine as engine
from lockstep.backends.reference.instruments import libraries, products, profile
from lockstep.backends.reference.model import Network
from lockstep.backends.reference.world import ReferenceWorld as world
from lockstep.backends.reference.world import devices
from lockstep.models import architectures
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe


def load_module(
    recipe: Recipe, tensors: dict[str, np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of normalised images [N, 3, H, W] to logits, float64 [N, logits]."""
    table = recipe.list_tensors()
    check_fit({tensor.name: tensor.shape for tensor in table}, tensors, "weights")
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}

    def compute(images: np.ndarray) -> np.ndarray:
        network = Network(recipe, weights, training=False)
        return network.logits(images.transpose(0, 2, 3, 1).astype(np.float64))[0]

    return compute
