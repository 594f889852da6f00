"""The place of every tensor of a model in one vector, for engines whose update is a few operations
on this vector."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.models.architectures import model_spec, tensors
from lockstep.recipes import Recipe


class Layout:
    """The order of a model's tensors in a vector: first decayed parameters, then other parameters,
    then running statistics.

    A vector with only the first `trained` values holds parameters without statistics, for example
    velocities.
    """

    def __init__(self, recipe: Recipe) -> None:
        table = list(tensors(model_spec(recipe.model), recipe.logits))
        self.shapes = {tensor.name: tensor.shape for tensor in table}
        """Shapes of all tensors, in canonical order."""
        decaying = [tensor for tensor in table if tensor.is_trained and recipe.decays(tensor)]
        others = [tensor for tensor in table if tensor.is_trained and tensor not in decaying]
        self.parameters = [tensor.name for tensor in (*decaying, *others)]
        """Names in the order of the vector, as in `statistics`."""
        self.statistics = [tensor.name for tensor in table if not tensor.is_trained]
        self.places: dict[str, slice] = {}
        self.size = 0
        for name in (*self.parameters, *self.statistics):
            self.places[name] = slice(self.size, self.size + math.prod(self.shapes[name]))
            self.size = self.places[name].stop
        self.decayed = self.places[decaying[-1].name].stop if decaying else 0
        self.trained = self.places[self.parameters[-1]].stop

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters."""
        return {name: shape for name, shape in self.shapes.items() if name in self.parameters}

    def views(self, vector: Any) -> dict[str, Any]:
        """Return the tensors in a framework's vector, by name. They share its memory."""
        return {
            name: vector[self.places[name]].reshape(self.shapes[name])
            for name in self._within(len(vector))
        }

    def arrays(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return a copy of the tensors in a vector, by name."""
        return {name: view.copy() for name, view in self.views(vector).items()}

    def vector(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the float32 vector of all tensors, or of all parameters."""
        values = np.empty(sum(array.size for array in arrays.values()), np.float32)
        for name, array in arrays.items():
            values[self.places[name]] = np.asarray(array).reshape(-1)
        return values

    def find_removed(self, masks: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return where masks are False: bool [trained]."""
        values = np.zeros(self.trained, bool)
        for name, mask in masks.items():
            values[self.places[name]] = ~np.asarray(mask, bool).reshape(-1)
        return values

    def _within(self, length: int) -> list[str]:
        return [name for name in self.shapes if self.places[name].stop <= length]
