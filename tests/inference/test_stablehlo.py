"""Programs of `jax.export`, compared with the reference in float64 and with Pillow's and OpenCV's
pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from tests.backends.cases import NARROWED
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    assert_answers,
    compute_expected,
    pictures,
    read_squares,
    run_alone,
    save_random,
)
from tests.recipes.cases import TF1
from tests.soak import in_a_soak

jax: Any = pytest.importorskip("jax")
SIZES = {"eval_resize": 47, "eval_crop": 40, "mean": MEAN, "std": STD}
"""The surplus of 7 pixels is odd, so that the rounding of the crop's place is noticed."""

ALONE = """
import sys
sys.modules["lockstep"] = None  # an import of it fails
import jax
import numpy as np
from safetensors.flax import load_file

folder, *batches = sys.argv[1:]

def load(name):
    with open(f"{folder}/{name}.stablehlo", "rb") as file:
        return jax.export.deserialize(bytearray(file.read())).call

resize, model = load("resize"), load("model")
weights = load_file(f"{folder}/weights.safetensors")
for path in batches:
    answers = model(weights, resize(np.load(path)))
    np.savez(path, **answers)
"""


def load(file: Path) -> Any:
    return jax.export.deserialize(bytearray(file.read_bytes())).call


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("narrow resnet50", marks=in_a_soak), "narrow resnext101-32x4d"]
)
def test_jax_alone_answers_as_float64(name: str, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(**SIZES, **NARROWED[name], padding="flax")
    weights = save_random(recipe, tmp_path)
    result = lockstep.load(weights).export(tmp_path / "program", to="stablehlo", compare=False)
    assert result["takes"] == "photos of any size: uint8 RGB [N, H, W, 3]"
    batches = [pictures(40, 57)[:1], pictures(71, 33)]
    paths, _ = run_alone(ALONE, [tmp_path / "program"], batches, tmp_path)
    for path, batch in zip(paths, batches, strict=True):
        assert_answers(np.load(f"{path}.npz"), compute_expected(weights, batch), np.int32)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"interpolation": "bicubic", "antialias": True}, 0),
        ({"interpolation": "bilinear"}, 0),
        (TF1, 0.005),
    ],
    ids=["Pillow", "OpenCV", "TensorFlow 1"],
)
def test_photos_become_the_pixels_of_evaluation(
    changes: dict[str, Any], share: float, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(**SIZES, **changes)
    weights = save_random(recipe, tmp_path)
    lockstep.load(weights).export(tmp_path / "program", to="stablehlo", compare=False)
    resize = load(tmp_path / "program" / "resize.stablehlo")
    for height, width in ((96, 131), (40, 57)):
        photos = pictures(height, width)
        squares = np.asarray(resize(photos))
        assert squares.dtype == np.uint8
        difference = np.abs(squares.astype(int) - read_squares(photos, recipe))
        assert difference.max() <= 1
        assert (difference > 0).mean() <= share


def test_an_export_is_compared_and_takes_only_rgb(tiny_recipe: Recipe, tmp_path: Path) -> None:
    weights = save_random(tiny_recipe, tmp_path)
    written = lockstep.load(weights).export(tmp_path / "program", to="stablehlo")
    assert written["comparison"]["runtime"] == f"jax {jax.__version__}"
    assert written["comparison"]["largest_difference"] < 1e-5
    assert (tmp_path / "program" / "classes.txt").read_text().splitlines() == list(CLASSES)
    resize = load(tmp_path / "program" / "resize.stablehlo")
    for images in (np.zeros((1, 32, 32, 3), np.float32), np.zeros((1, 3, 32, 32), np.uint8)):
        with pytest.raises(ValueError, match=r"float32|\(1, 3, 32, 32\)|dimension"):
            resize(images)


def test_other_weights_than_the_models_are_refused(tiny_recipe: Recipe, tmp_path: Path) -> None:
    from lockstep.backends.jax.export import export_stablehlo

    with pytest.raises(CheckpointError, match="weights"):
        export_stablehlo(tiny_recipe, {}, (), tmp_path / "program")
    assert not (tmp_path / "program").exists()
