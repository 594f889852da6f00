"""Random weights of the tiny recipe."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint
from tests.inference.cases import CLASSES, MEAN, STD, random_tensors, save_random

SaveWeights = Callable[..., Path]


@pytest.fixture(scope="session")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights. Tests must only read it."""
    return save_random(tiny_recipe.replace(mean=MEAN, std=STD), tmp_path_factory.mktemp("weights"))


@pytest.fixture
def save_weights(tiny_recipe: Recipe, tmp_path: Path) -> SaveWeights:
    """A function that saves random weights of the tiny recipe with some changed fields, and returns
    the checkpoint."""

    def save(
        seed: int = 1,
        classes: tuple[str, ...] = CLASSES,
        favourite: int | None = None,
        **changes: object,
    ) -> Path:
        recipe = tiny_recipe.replace(**changes)
        averages = random_tensors(recipe, seed + 1) if recipe.ema_decay else {}
        state = State(seed, random_tensors(recipe, seed), {}, averages)
        if favourite is not None:
            state.tensors["fc.bias"][favourite] = 100
        about = {"recipe": recipe.fields(), "classes": classes}
        return checkpoint.save(tmp_path / "run" / "checkpoints", state, data_digest="", about=about)

    return save
