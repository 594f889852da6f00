"""Small weights for the tests of certificates."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import Weights, checkpoint
from tests.weights.formats.cases import state_of
from tests.weights.small_models import positive_tensors, recipe_of

RECIPE = recipe_of().replace(image_size=64, eval_resize=72, eval_crop=64)


def tensors() -> dict[str, np.ndarray]:
    return positive_tensors(RECIPE)


def save_checkpoint(folder: Path, values: dict[str, np.ndarray], recipe: Recipe = RECIPE) -> Path:
    """Save a checkpoint with velocities and return its path."""
    about = {"recipe": recipe.fields(), "classes": []}
    state = State(7, values, state_of(recipe).momentum)
    return checkpoint.save(folder / "source", state, data_digest="", about=about)


def change_bias(weights: Weights) -> Weights:
    bias = weights.tensors["fc.bias"].copy()
    bias[2] += 1
    return replace(
        weights, state=replace(weights.state, tensors=weights.tensors | {"fc.bias": bias})
    )


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "source")
