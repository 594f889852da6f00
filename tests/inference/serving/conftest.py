from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Recipe
from lockstep.weights.calibration import write_calibration
from tests.inference.cases import FIT, MEAN, STD, image_file, save_random
from tests.inference.serving.cases import ENGINE, TEMPERATURE, UNKNOWN_BELOW, Server, serving


@pytest.fixture(scope="session")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a tiny model with ten classes, for images of 32 px, with a temperature and
    a threshold."""
    recipe = tiny_recipe.replace(
        mean=MEAN, std=STD, eval_resize=40, antialias=True, exif_orientation=True
    )
    path = save_random(recipe, tmp_path_factory.mktemp("weights"))
    entry: Any = {**FIT, "temperature": TEMPERATURE, "unknown_below": UNKNOWN_BELOW}
    write_calibration(path / "model.safetensors", entry)
    return path


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of different sizes, as PNG and JPEG."""
    folder = tmp_path_factory.mktemp("photos")
    return [
        image_file(folder, height, 60 + height, ".jpg" if height % 2 else ".png")
        for height in range(50, 58)
    ]


@pytest.fixture(scope="session")
def server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that many tests use. They must leave it as it is."""
    with serving(
        weights, tmp_path_factory.mktemp("log") / "server.log", "--runtime", ENGINE
    ) as server:
        yield server
