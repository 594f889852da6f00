"""Engines with a fault in stochastic depth, and the tests that must find it."""

from dataclasses import replace
from typing import Any

from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.data import Batch
from lockstep.models.metrics import Counts
from tests.backends import wrong
from tests.backends.fault_finders import ALL_IN_PARTS, GRADIENT, LOSS, STATISTICS, make_step_tests
from tests.backends.wrong import Array, change_function, change_recipe


class KeepsAllBlocks(ReferenceEngine):
    """Trains without stochastic depth."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        return super()._gradients(replace(batch, kept_blocks=None), rows)


class NormalisesKeptImages(ReferenceEngine):
    """Trains on the images that keep all blocks, so that batch norms see no others."""

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        assert batch.kept_blocks is not None
        return super()._gradients(batch, rows[batch.kept_blocks[rows].all(axis=1)])


DEPTH_FAULTS: dict[str, tuple[Any, ...]] = {
    "no stochastic depth": (
        KeepsAllBlocks,
        *make_step_tests(LOSS, "stochastic depth", ALL_IN_PARTS),
    ),
    "does not divide what is kept": (
        change_function("drop", wrong.drop_without_scaling),
        *make_step_tests(LOSS, "stochastic depth"),
    ),
    "divides by another block's share": (
        change_recipe(lambda recipe: {"stochastic_depth": recipe.stochastic_depth / 2}),
        *make_step_tests(LOSS, "stochastic depth", ALL_IN_PARTS),
    ),
    "drops the blocks of the next image": (
        change_function("drop", wrong.drop_of_the_next_image),
        *make_step_tests(LOSS, "stochastic depth"),
    ),
    "in the forward pass alone": (
        change_function("drop", wrong.drop_forward_alone),
        *make_step_tests(GRADIENT, "stochastic depth"),
    ),
    "batch norms see kept images alone": (
        NormalisesKeptImages,
        *make_step_tests(STATISTICS, "stochastic depth"),
    ),
}
"""A wrong engine, and tests that must all fail with it."""
