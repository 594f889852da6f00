"""What the tests of schedulers train: narrow models, for longer than any test lasts."""

from pathlib import Path

import pytest

from lockstep.recipes import Recipe
from tests.schedulers.cases import ENDLESS


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Recipe) -> Path:
    """The recipe of the tests, as a file."""
    file = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    file.write_text(tiny_recipe.format_yaml())
    return file


@pytest.fixture
def train(recipe_file: Path, textures: Path) -> list[object]:
    """A command that trains on PyTorch, without its folder."""
    return ["train", "--recipe", recipe_file, "--data", textures, *ENDLESS]
