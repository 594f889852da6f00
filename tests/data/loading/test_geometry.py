"""Evaluation in the geometry of NVIDIA's originals, compared with the operators of DALI and
TensorFlow on odd sizes.

The images are drawn, or photos of a folder: `LOCKSTEP_PHOTOS=FOLDER pytest
tests/data/loading/test_geometry.py`.
"""

import os
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding.decode import decode
from lockstep.data.index import Index, open_index, subset
from lockstep.data.loading.dali import import_dali
from lockstep.data.loading.loaders import make_loader
from lockstep.recipes import Execution
from lockstep.recipes.order import evaluation_plans
from lockstep.recipes.published import RECIPES
from tests.inference.cases import read_as_tensorflow_1

SIZES = ((354, 500), (500, 354), (375, 500), (301, 307), (97, 131))
"""Sides after the resize of 361.6 and 341.3, a half in the crop's place, and an image that is
enlarged."""

CHANGES: dict[str, dict[str, Any]] = {
    "as published": {},
    "filtered": {"eval_antialias": True},
    "up to the borders": {"eval_resize": 224},
    "filtered, up to the borders": {"eval_antialias": True, "eval_resize": 224},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """JPEGs with smooth colours, edges and grain, or the first 200 photos of LOCKSTEP_PHOTOS."""
    if folder := os.environ.get("LOCKSTEP_PHOTOS"):
        index = open_index(folder)
        return subset(index, np.arange(min(len(index), 200)))
    root = tmp_path_factory.mktemp("photos")
    (root / "images").mkdir()
    for number, (height, width) in enumerate(SIZES):
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), int)
        pixels = pixels + random.integers(-9, 10, pixels.shape)
        pixels[height // 3 : -height // 3, width // 4 : width // 2] //= 2
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            root / "images" / f"{number}.jpg", quality=95
        )
    return open_index(root)


@pytest.fixture(scope="module")
def measure_dali(photos: Index) -> dict[str, np.ndarray]:
    """What Paddle's and MXNet's originals evaluate, as in `CHANGES`: float32 [N, 224, 224, 3]."""
    fn, _, pipeline_def = import_dali()
    images = [decode(photos.read(i)) for i in range(len(photos))]

    @pipeline_def(batch_size=len(images), num_threads=1, device_id=None)
    def original() -> Any:
        external = fn.external_source(source=[images])
        arguments = [
            (how.get("eval_resize", 256), how.get("eval_antialias", False))
            for how in CHANGES.values()
        ]
        resized = [
            fn.resize(external, resize_shorter=shorter, antialias=antialias)
            for shorter, antialias in arguments
        ]
        how = {"crop": (224, 224), "mean": 0.0, "std": 1.0, "output_layout": "HWC"}
        return tuple(fn.crop_mirror_normalize(images_, **how) for images_ in resized)

    pipeline = original()
    pipeline.build()
    return {
        name: np.asarray(images_.as_tensor())
        for name, images_ in zip(CHANGES, pipeline.run(), strict=True)
    }


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("loader", ["host", "dali"])
def test_evaluation_by_the_paddle_recipe_is_that_of_dalis_operators(
    loader: str, name: str, photos: Index, measure_dali: dict[str, np.ndarray]
) -> None:
    recipe = RECIPES["resnet50-paddle-90ep"]().replace(**CHANGES[name])
    assert np.abs(evaluate(photos, recipe, loader) - measure_dali[name]).max() <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_side_rounding": "down"},
        {"eval_offset_rounding": "even"},
        {"eval_sampling": "half_pixel"},
    ],
    ids=str,
)
def test_without_one_of_its_fields_it_is_another(
    changes: dict[str, Any], photos: Index, measure_dali: dict[str, np.ndarray]
) -> None:
    recipe = RECIPES["resnet50-mxnet-90ep"]().replace(**changes)
    assert np.abs(evaluate(photos, recipe, "host") - measure_dali["as published"]).max() > 5


def evaluate(index: Index, recipe: Any, loader: str) -> np.ndarray:
    """Return the images of an evaluation: float32 [N, 224, 224, 3]."""
    plans = evaluation_plans(recipe, index.sizes, len(index))
    execution = Execution(loader=loader, loader_threads=1)
    with make_loader(index, recipe, execution, evaluation=True) as made:
        [batch] = made.batches(plans)
    return batch.images.astype(np.float32)


def test_dali_evaluates_the_tensorflow_recipe_as_the_host_loader(photos: Index) -> None:
    recipe = RECIPES["resnet50-tensorflow-90ep"]()
    assert np.abs(evaluate(photos, recipe, "dali") - evaluate(photos, recipe, "host")).max() <= 1


def test_evaluation_by_the_tensorflow_recipe_is_that_of_tensorflow_1(photos: Index) -> None:
    images = evaluate(photos, RECIPES["resnet50-tensorflow-90ep"](), "host")
    for number, image in enumerate(images):
        expected = read_as_tensorflow_1(decode(photos.read(number)).copy(), 256, 224)
        assert np.abs(image - expected.astype(np.float32)).max() <= 1
