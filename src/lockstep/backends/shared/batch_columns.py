"""The arrays of a batch besides images and labels, in the order in which compiled steps take
them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data import Batch
from lockstep.recipes import Recipe


class Columns(NamedTuple):
    """The columns of a batch as tensors of a framework, named as in `Batch`; None if the recipe has
    no such column."""

    kept_features: Any = None
    kept_blocks: Any = None
    coefficients: Any = None
    partners: Any = None
    target_coefficients: Any = None
    """Those of the pixels, unless CutMix pastes."""
    boxes: Any = None


def list_columns(batch: Batch) -> list[np.ndarray]:
    """Return the columns that a batch has, in order."""
    columns = (
        *(batch.kept_features, batch.kept_blocks, batch.coefficients, batch.partners),
        *(batch.target_coefficients, batch.boxes),
    )
    return [column for column in columns if column is not None]


def name_columns(recipe: Recipe, columns: Sequence[Any]) -> Columns:
    """Return the columns of a batch of this recipe by their names. They are in order."""
    mixing = list(columns)
    kept_features = mixing.pop(0) if recipe.dropout else None
    kept_blocks = mixing.pop(0) if recipe.stochastic_depth else None
    if not mixing:
        return Columns(kept_features, kept_blocks)
    coefficients, partners, *cut = mixing
    target_coefficients, boxes = cut or (coefficients, None)
    return Columns(kept_features, kept_blocks, coefficients, partners, target_coefficients, boxes)
