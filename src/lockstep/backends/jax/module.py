"""What `load_module` returns: a function without state, and its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax.model import Array, Arrays, Pass, convert_all, new_arrays
from lockstep.recipes import Recipe


@dataclass(frozen=True)
class Module:
    """The model in evaluation mode.

    `module.apply(module.params, images)`, or `module(images)`, are the logits [N, logits] of
    normalised images [N, H, W, 3].
    """

    apply: Callable[[Arrays, Array], Array]
    """Parameters and images to logits. It can be differentiated, compiled and vectorised."""
    params: Arrays
    """Trained tensors by canonical name: kernels [height, width, in / groups, out], classifier [in,
    out]. The statistics of batch norm are in `apply`."""

    def __call__(self, images: Array) -> Array:
        """Return the logits."""
        return self.apply(self.params, images)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Module:
    """Return the model in evaluation mode: normalised NHWC images to logits."""
    arrays = convert_all(new_arrays(recipe), tensors, "weights")
    values = {name: jnp.asarray(array) for name, array in arrays.items()}
    params = {name: values.pop(name) for name in _list_parameters(recipe)}
    on_gpu = jax.default_backend() != "cpu"
    return Module(jax.jit(partial(_compute_logits, recipe, values, on_gpu)), params)


def _list_parameters(recipe: Recipe) -> list[str]:
    table = recipe.list_tensors()
    return [tensor.name for tensor in table if tensor.is_trained]


def _compute_logits(
    recipe: Recipe, statistics: Arrays, on_gpu: bool, params: Arrays, images: Array
) -> Array:
    values = statistics | params
    return Pass(recipe, values, training=False, on_gpu=on_gpu).logits(images)
