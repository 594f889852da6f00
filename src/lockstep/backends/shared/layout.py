"""The place of every tensor of a model in one vector, for engines whose update is a few operations
on this vector."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.recipes import Recipe
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors


@dataclass(frozen=True)
class Group:
    """Trained parameters with the same weight decay and the same factor of the learning rate."""

    place: slice
    """Their place among the trained parameters."""
    decay: float
    factor: float
    tensors: tuple[slice, ...]
    """The places of the single parameters within the group."""


class Layout:
    """The order of a model's tensors in a vector: frozen parameters, trained parameters by group,
    statistics that training moves, frozen statistics.

    What a step changes is thus one part of the vector. A vector of only the first `count` values
    holds parameters without statistics, for example velocities.
    """

    def __init__(self, recipe: Recipe) -> None:
        table = list(recipe.list_tensors())
        self.shapes = {tensor.name: tensor.shape for tensor in table}
        """Shapes of all tensors, in canonical order."""
        factors = rate_factors(recipe)
        groups: dict[tuple[bool, float], list[str]] = {}
        for tensor in table:
            if tensor.name in factors:
                key = (not recipe.decays(tensor), factors[tensor.name])
                groups.setdefault(key, []).append(tensor.name)
        self.trained = [name for key in sorted(groups) for name in groups[key]]
        """Names of the trained parameters, in the order of the vector."""
        changing = changing_tensors(recipe)
        self.statistics = [name for name in changing if name not in factors]
        """Names of the statistics that training moves, in the order of the vector."""
        parameters = [tensor.name for tensor in table if tensor.is_trained]
        frozen = [name for name in parameters if name not in factors]
        others = [name for name in self.shapes if name not in (*parameters, *self.statistics)]
        self.places: dict[str, slice] = {}
        self.size = 0
        for name in (*frozen, *self.trained, *self.statistics, *others):
            self.places[name] = slice(self.size, self.size + math.prod(self.shapes[name]))
            self.size = self.places[name].stop
        self.trained_place = self._span(self.trained)
        self.count = self.trained_place.stop
        """Number of values of all parameters."""
        self.moving_place = slice(self.count, self._span([*self.trained, *self.statistics]).stop)
        """Where the statistics are that training moves. It can be empty."""
        self.changing_place = slice(self.trained_place.start, self.moving_place.stop)
        """Where everything is that a step changes."""
        self.groups = []
        for is_plain, factor in sorted(groups):
            names = groups[is_plain, factor]
            decay = 0.0 if is_plain else recipe.weight_decay
            span = self._span(names)
            places = tuple(_move(self.places[name], -span.start) for name in names)
            place = _move(span, -self.trained_place.start)
            self.groups.append(Group(place, decay, factor, places))

    def _span(self, names: Sequence[str]) -> slice:
        return slice(self.places[names[0]].start, self.places[names[-1]].stop)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters."""
        return {name: self.shapes[name] for name in self._within(self.count)}

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
        """Return where masks are False: bool [count]."""
        values = np.zeros(self.count, bool)
        for name, mask in masks.items():
            values[self.places[name]] = ~np.asarray(mask, bool).reshape(-1)
        return values

    def _within(self, length: int) -> list[str]:
        return [name for name in self.shapes if self.places[name].stop <= length]


def _move(place: slice, distance: int) -> slice:
    return slice(place.start + distance, place.stop + distance)
