"""Where every tensor of a model lies in one vector."""

import math
from collections.abc import Mapping

import numpy as np
import paddle

from lockstep.backends.paddle.world import Tensor
from lockstep.models import model_spec, tensors
from lockstep.recipes import Recipe


class Layout:
    """The order of a model's tensors in a vector: what decays first, then other parameters, then running statistics.

    A vector of the first `trained` values holds parameters alone, such as velocities.
    """

    def __init__(self, recipe: Recipe) -> None:
        table = list(tensors(model_spec(recipe.model), recipe.logits))
        self.shapes = {tensor.name: tensor.shape for tensor in table}
        """In canonical order."""
        decaying = [tensor for tensor in table if tensor.is_trained and tensor.role in recipe.weight_decay_roles]
        others = [tensor for tensor in table if tensor.is_trained and tensor not in decaying]
        self.parameters = [tensor.name for tensor in (*decaying, *others)]
        """In the vector's order; and so `statistics`."""
        self.statistics = [tensor.name for tensor in table if not tensor.is_trained]
        self.places: dict[str, slice] = {}
        self.size = 0
        for name in (*self.parameters, *self.statistics):
            self.places[name] = slice(self.size, self.size + math.prod(self.shapes[name]))
            self.size = self.places[name].stop
        self.decayed = self.places[decaying[-1].name].stop if decaying else 0
        self.trained = self.places[self.parameters[-1]].stop

    def of_parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters."""
        return {name: shape for name, shape in self.shapes.items() if name in self.parameters}

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a vector, by name; they share its memory."""
        return {name: vector[self.places[name]].reshape(self.shapes[name]) for name in self._within(len(vector))}

    def arrays(self, vector: Tensor) -> dict[str, np.ndarray]:
        """Return a copy of the tensors in a vector, by name."""
        values = vector.numpy()
        return {name: values[self.places[name]].reshape(self.shapes[name]).copy() for name in self._within(len(values))}

    def fill(self, vector: Tensor, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays into a vector that has a place for each."""
        values = np.empty(len(vector), np.float32)
        for name, array in arrays.items():
            values[self.places[name]] = np.asarray(array).reshape(-1)
        vector.copy_(paddle.to_tensor(values), True)

    def _within(self, length: int) -> list[str]:
        return [name for name in self.shapes if self.places[name].stop <= length]
