"""A run on photos with EXIF orientations, compared bit for bit with a run on the same photos stored
upright."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

import lockstep
from lockstep.recipes import Execution, Recipe
from tests.runs.cases import read_outcome


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Path, Path]:
    """Photos of all orientations, and what Pillow shows of them, stored upright."""
    random = np.random.default_rng(5)
    for number in range(24):
        exif = Image.Exif()
        name = f"{'val' if number < 8 else 'train'}/{number % 2}/{number:02d}"
        exif[0x0112] = 1 + number // 2 % 8
        stored = tmp_path / "stored" / f"{name}.png"
        upright = tmp_path / "upright" / f"{name}.png"
        for path in (stored, upright):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 56, 3), dtype=np.uint8)).save(
            stored, exif=exif
        )
        ImageOps.exif_transpose(Image.open(stored)).save(upright)
    return tmp_path / "stored", tmp_path / "upright"


def test_a_run_on_turned_photos_is_that_on_upright_ones(
    photos: tuple[Path, Path], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    runs = [tmp_path / name for name in ("turned", "as upright", "as stored")]
    execution = Execution(compile="off", log_every_steps=1)
    for run, data, turns in zip(runs, (*photos, photos[0]), (True, False, False), strict=True):
        recipe = tiny_recipe.replace(logits=2, epochs=1, exif_orientation=turns)
        lockstep.train(recipe, data, run, execution=execution)
    assert read_outcome(runs[0]) == read_outcome(runs[1]) != read_outcome(runs[2])
    turned, upright = (
        lockstep.load(run).evaluate(data).to_json()["loss"]
        for run, data in zip(runs[:2], photos, strict=True)
    )
    assert turned == upright
