"""The same run with images in four storage formats gives bit-identical losses and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import FORMATS
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published import RECIPES
from tests.conftest import TINY_MODEL
from tests.runs.cases import read_losses, read_outcome

PACKED = {"recordio": 1, "tfrecord": 3, "webdataset": 2, "folder": 0}


@pytest.fixture(scope="module")
def data_sets(textures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The textures in every storage format."""
    root = tmp_path_factory.mktemp("packed")
    for name, shards in PACKED.items():
        pack(textures, root / name, Packing(name, shards=shards))
    return {name: root / name for name in PACKED}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """resnet50-paddle-90ep for a narrow model, small images and two epochs."""
    published = RECIPES["resnet50-paddle-90ep"]()
    small = {"image_size": 32, "eval_resize": 36, "eval_crop": 32, "precision": "fp32"}
    return published.replace(
        model=TINY_MODEL, logits=10, epochs=2, global_batch_images=8, warmup_epochs=0.5, **small
    )


def test_every_format_is_packed() -> None:
    assert set(PACKED) == set(FORMATS)


@pytest.fixture(scope="module")
def whole(recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the class folders that was never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    execution = Execution(compile="off", log_every_steps=1)
    lockstep.train(recipe, textures, run, execution=execution)
    return run


@pytest.mark.parametrize("name", PACKED)
def test_losses_and_weights_are_those_of_the_folder(
    name: str, data_sets: dict[str, Path], recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    execution = Execution(compile="off", log_every_steps=1)
    lockstep.train(recipe, data_sets[name], tmp_path / "run", execution=execution)
    losses, weights = read_outcome(tmp_path / "run")
    assert len([event for event in losses if event[0] == "train"]) == 14
    assert (losses, weights) == read_outcome(whole)


class Stopped(Exception):
    """An exception that is raised within a run."""


def test_a_run_resumes_from_another_format(
    data_sets: dict[str, Path], recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    execution = Execution(compile="off", save_every_steps=3)
    for name in ("webdataset", "recordio"):

        def stop(event: dict[str, Any]) -> None:
            if event["kind"] == "train" and event["step"] in (7, 10):
                raise Stopped

        with pytest.raises(Stopped):
            lockstep.train(
                recipe, data_sets[name], tmp_path / "parts", execution=execution, listener=stop
            )
    lockstep.train(recipe, data_sets["tfrecord"], tmp_path / "parts", execution=execution)
    assert read_outcome(tmp_path / "parts")[1] == read_outcome(whole)[1]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("recordio", "torch"),
        ("webdataset", "paddle"),
        pytest.param("tfrecord", "tensorflow", marks=pytest.mark.slow),
    ],
)
def test_dali_trains_to_nearly_the_same_losses(
    name: str,
    backend: str,
    data_sets: dict[str, Path],
    recipe: Recipe,
    textures: Path,
    tmp_path: Path,
) -> None:
    # A pixel differs by at most one level of 255. The learning rate is so low that the random
    # network does not amplify it.
    recipe = recipe.replace(lr=1e-4)
    losses = []
    for loader, data in (("host", textures), ("dali", data_sets[name])):
        execution = Execution(backend=backend, compile="off", log_every_steps=1, loader=loader)
        lockstep.train(recipe, data, tmp_path / loader, execution=execution)
        losses.append(read_losses(tmp_path / loader))
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)


def test_a_run_on_noise_needs_no_decoder(
    data_sets: dict[str, Path], recipe: Recipe, tmp_path: Path
) -> None:
    execution = Execution(compile="off", loader="synthetic")
    report = lockstep.train(recipe, data_sets["recordio"], tmp_path / "run", execution=execution)
    assert report["final"]["trained"]["images"] == 20


PUBLISHED = {
    "resnet50-paddle-90ep": ("paddle", "webdataset", (1000, "symmetric", "fp16")),
    "resnet50-tensorflow-90ep": ("tensorflow", "tfrecord", (1001, "same", "fp16")),
}
"""Published recipes, each with its backend, a storage format, and its logits, padding and
precision."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_trains_on_the_backend_it_was_published_for(
    name: str, data_sets: dict[str, Path], tmp_path: Path
) -> None:
    small = {"image_size": 32, "eval_resize": 36, "eval_crop": 32}
    small |= {"epochs": 2, "global_batch_images": 8}
    recipe = RECIPES[name]().replace(model=TINY_MODEL, **small)
    own, storage, fields = PUBLISHED[name]
    assert (recipe.logits, recipe.padding, recipe.precision) == fields
    first = {}
    for backend in (own, "torch"):
        execution = Execution(backend=backend, compile="off", log_every_steps=1)
        report = lockstep.train(recipe, data_sets[storage], tmp_path / backend, execution=execution)
        assert report["final"]["trained"]["images"] == 20
        losses = read_losses(tmp_path / backend)
        assert len(losses) == 14
        assert np.isfinite(losses).all()
        first[backend] = losses[0]
    assert first[own] == pytest.approx(first["torch"], rel=2e-3)
