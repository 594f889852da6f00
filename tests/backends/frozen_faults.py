"""Engines with a fault in what is frozen or in the rates of tensors, and the tests that must find
it."""

from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from lockstep.backends.reference import model
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.data import Batch
from lockstep.models.metrics import Counts
from lockstep.models.sections import find_section, sections
from lockstep.recipes import Recipe
from tests.backends import native as natives
from tests.backends import test_frozen
from tests.backends.fault_finders import (
    GRADIENT,
    LOSS,
    STATISTICS,
    make_step_tests,
    make_trajectory_tests,
)
from tests.backends.wrong import Array, change_recipe


class DecaysTheFrozen(ReferenceEngine):
    """Applies weight decay to frozen tensors, which have no gradient."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        super()._update(gradients, step)
        for name in self._decayed - gradients.keys():
            self._tensors[name] = self._tensors[name] * np.float32(
                1 - self._learning_rates[step] * self._recipe.weight_decay
            )


class AveragesTheFrozen(ReferenceEngine):
    """Moves the averages of frozen tensors, too."""

    def _average(self, step: int) -> None:
        changing = self._changing
        self._changing = list(self._ema)
        super()._average(step)
        self._changing = changing


class MovesFrozenStatistics(ReferenceEngine):
    """Computes with the running statistics of a frozen batch norm, but moves them, too."""

    def _step(self, batch: Batch, step: int) -> Counts:
        counts = super()._step(batch, step)
        for name in self._tensors.keys() - self._changing - self._velocity.keys():
            self._tensors[name] = self._tensors[name] * np.float32(0.9)
        return counts


class NormalisesTheFrozenByTheBatch(ReferenceEngine):
    """Computes a frozen batch norm as any other one, but keeps its running statistics."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        kept = dict(self._tensors)
        with patch.object(model, "frozen_norms", lambda recipe: frozenset()):
            result = super()._gradients(batch, rows)
        for name in kept.keys() - self._changing:
            self._tensors[name] = kept[name]
        return result


class MultipliesGradients(ReferenceEngine):
    """Multiplies gradients, and so velocities, instead of rates."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        factors = self._rate_factors
        scaled = {name: gradient * factors[name] for name, gradient in gradients.items()}
        self._rate_factors = dict.fromkeys(factors, 1.0)
        super()._update(scaled, step)
        self._rate_factors = factors


class DecaysRatesFromTheStem(ReferenceEngine):
    """Counts the depth of a tensor from the stem up."""

    def __init__(self, recipe: Recipe, *others: Any) -> None:
        super().__init__(recipe, *others)
        names = sections(recipe.spec)
        for name, factor in self._rate_factors.items():
            depth = names.index(find_section(name))
            wrong = len(names) - 1 - depth
            self._rate_factors[name] = factor * recipe.lr_depth_decay ** (wrong - depth)


BITS = test_frozen.test_frozen_tensors_keep_their_bits_and_no_others
EVALUATION = test_frozen.test_a_frozen_backbone_computes_as_in_evaluation
OWN_OPTIMIZER = partial(
    test_frozen.test_rates_are_those_of_the_frameworks_own_optimizer_with_groups,
    native=natives.find("reference"),
)
NO_BACKWARD = partial(
    test_frozen.test_nothing_is_computed_backwards_below_the_lowest_trained_tensor,
    native=natives.find("reference"),
    frozen="backbone",
    convolutions=0,
)
FROZEN_STEPS = ("frozen tensors", "frozen backbone")
TRAJECTORY = make_trajectory_tests("frozen tensors and rates by tensor")

FROZEN_FAULTS: dict[str, tuple[Any, ...]] = {
    "trains what is frozen": (
        change_recipe(lambda recipe: {"frozen": ()}),
        BITS,
        *make_step_tests(GRADIENT, *FROZEN_STEPS),
        *make_step_tests(STATISTICS, *FROZEN_STEPS),
    ),
    "decays what is frozen": (DecaysTheFrozen, BITS, *TRAJECTORY),
    "averages what is frozen": (AveragesTheFrozen, BITS),
    "moves the statistics of frozen batch norms": (
        MovesFrozenStatistics,
        BITS,
        *make_step_tests(STATISTICS, *FROZEN_STEPS),
    ),
    "normalises by the batch where a batch norm is frozen": (
        NormalisesTheFrozenByTheBatch,
        EVALUATION,
        *make_step_tests(LOSS, *FROZEN_STEPS),
    ),
    "computes gradients of the whole backbone": (
        change_recipe(lambda recipe: {"frozen": ()}),
        NO_BACKWARD,
    ),
    "one rate for all tensors": (
        change_recipe(lambda recipe: {"lr_multipliers": {}, "lr_depth_decay": 1.0}),
        *TRAJECTORY,
        OWN_OPTIMIZER,
    ),
    "multiplies gradients instead of rates": (MultipliesGradients, *TRAJECTORY),
    "the shortest prefix counts": (
        change_recipe(lambda recipe: {"lr_multipliers": {"backbone": 0.5, "fc": 2}}),
        *TRAJECTORY,
        OWN_OPTIMIZER,
    ),
    "rates fall from the stem up": (DecaysRatesFromTheStem, *TRAJECTORY, OWN_OPTIMIZER),
}
"""A wrong engine, and tests that must all fail with it."""
