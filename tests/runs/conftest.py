from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Recipe
from tests.runs.cases import EXECUTION


@pytest.fixture(scope="package")
def uninterrupted(
    tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run of the tiny recipe that was never interrupted. Tests only read it."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    lockstep.train(tiny_recipe.rename("resnet50-paddle-90ep"), textures, out, execution=EXECUTION)
    return out


@pytest.fixture(scope="package")
def dense(tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one epoch, with a moving average."""
    out = tmp_path_factory.mktemp("dense") / "a dense run"
    lockstep.train(tiny_recipe.replace(epochs=1, ema_decay=0.9), textures, out)
    return out
