"""Quantised runs: they start from trained weights, calibrate once, and keep their scales."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import lockstep
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, CheckpointError, DivergedError, RecipeError
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import settle_identity
from tests.inference.cases import random_tensors
from tests.runs.cases import (
    find_same_parts,
    read_entries,
    read_state,
    stop_at,
    stop_when,
    train_until,
)

EXECUTION = Execution(compile="off", log_every_steps=1, save_every_steps=3, keep_checkpoints=99)


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(quantisation="int8", calibration_images=17, ema_decay=0.9, epochs=1)


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    checkpoint.write_weights(
        path, random_tensors(tiny_recipe, 1), {"recipe": tiny_recipe.fields(), "classes": []}
    )
    return path


@pytest.fixture(scope="module")
def whole(
    recipe: Recipe, weights: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A quantised run of 7 steps that was never interrupted. Tests only read it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    lockstep.train(recipe, textures, out, weights=weights, execution=EXECUTION)
    return out


def read_scales(file: Path) -> Any:
    with safe_open(file, framework="numpy") as opened:
        return json.loads(opened.metadata()["lockstep"])["scales"]


def test_every_checkpoint_has_the_scales_of_the_first(whole: Path, recipe: Recipe) -> None:
    files = sorted(whole.glob("checkpoints/*/*.safetensors"))
    first = read_scales(files[0])
    assert tuple(first) == layers(recipe.model)
    assert [read_scales(file) for file in files if file.stem != "momentum"] == [first] * 8
    (start,) = read_entries(whole, "start")
    # 3 batches of 8 images
    note = "the inputs of 18 layers have int8 scales from 24 training images"
    assert note in start["notes"]


def test_a_quantised_run_resumes_bit_for_bit(
    whole: Path, recipe: Recipe, weights: Path, textures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    how = {"weights": weights, "execution": EXECUTION}
    train_until(stop_at("train", 2), recipe, textures, run, **how)
    lockstep.train(recipe, textures, run, execution=EXECUTION)
    assert find_same_parts(run, whole) == ["tensors", "momentum", "ema"]


def test_a_stop_while_calibrating_trains_nothing(
    recipe: Recipe, weights: Path, textures: Path, tmp_path: Path
) -> None:
    listener = stop_when(lambda event: event.get("what") == "calibrating")
    stopped = train_until(listener, recipe, textures, tmp_path / "run", weights=weights)
    assert str(stopped).startswith("stopped by SIGTERM while calibrating; nothing was trained yet")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_evaluating_quantises_as_the_run_did(whole: Path, textures: Path, tmp_path: Path) -> None:
    lockstep.load(whole, checkpoint="newest").save(tmp_path / "w.safetensors", certificate=False)
    plain = lockstep.load_recipe(whole).replace(quantisation="none")
    checkpoint.write_weights(
        tmp_path / "f.safetensors",
        read_state(whole).tensors,
        {"recipe": plain.fields(), "classes": []},
    )
    reported = json.loads((whole / "report.json").read_text())["final"]["trained"]["loss"]
    run, converted, in_float = (
        lockstep.load(source, checkpoint="newest").evaluate(textures).to_json()["loss"]
        for source in (whole, tmp_path / "w.safetensors", tmp_path / "f.safetensors")
    )
    assert [run, converted] == pytest.approx([reported] * 2, rel=1e-6)
    assert in_float != pytest.approx(reported, rel=1e-3)
    on_paddle = lockstep.load(tmp_path / "w.safetensors").on("paddle")
    with pytest.raises(BackendError, match="paddle backend does not compute; use --backend jax or"):
        on_paddle.evaluate(textures)


def test_a_quantised_recipe_needs_trained_weights_and_an_engine_that_quantises(
    recipe: Recipe, weights: Path, textures: Path, tmp_path: Path
) -> None:
    message = r"calibrates trained weights, but none.*quantisation=none first.*--weights"
    with pytest.raises(RecipeError, match=message):
        lockstep.train(recipe, textures, tmp_path / "run")
    how = {"weights": weights, "execution": Execution(backend="paddle")}
    with pytest.raises(BackendError, match="quantisation is int8, but the paddle backend"):
        lockstep.train(recipe, textures, tmp_path / "run", **how)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_calibrated(
    recipe: Recipe, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    tensors = random_tensors(tiny_recipe, 1)
    tensors["bn1.weight"][0] = np.nan
    checkpoint.write_weights(
        tmp_path / "w.safetensors", tensors, {"recipe": tiny_recipe.fields(), "classes": []}
    )
    with pytest.raises(DivergedError, match=r"found nan in the input of layer1\.0\.conv1"):
        lockstep.train(recipe, textures, tmp_path / "run", weights=tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "has no scales, which its recipe's quantisation needs"),
        ({"conv1": "wide"}, "has no scales"),
        ({"conv1": 1.0}, "scales: missing"),
        ({"fc": 0.0}, "that of fc is 0.0, expected a finite number above 0"),
    ],
)
def test_a_file_without_fitting_scales_is_refused(
    scales: dict[str, Any] | None,
    message: str,
    whole: Path,
    recipe: Recipe,
    textures: Path,
    tmp_path: Path,
) -> None:
    if scales == {"fc": 0.0}:
        scales = dict.fromkeys(layers(recipe.model), 1.0) | scales
    about = {"recipe": recipe.fields(), "classes": []}
    if scales is not None:
        about["scales"] = scales
    checkpoint.write_weights(tmp_path / "w.safetensors", read_state(whole).tensors, about)
    with pytest.raises(CheckpointError, match=message):
        lockstep.load(tmp_path / "w.safetensors").evaluate(textures).to_json()


def test_a_run_whose_checkpoint_lost_its_scales_does_not_resume(
    whole: Path, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(folder)
    state, digest = checkpoint.load(checkpoint.checkpoint_path(whole / "checkpoints", 3))
    about = {"recipe": recipe.fields(), "classes": []}
    checkpoint.save(
        tmp_path / "run" / "checkpoints",
        state,
        data_digest=digest,
        about=about,
        run_id=settle_identity(whole).id,
    )
    with pytest.raises(CheckpointError, match="has no scales"):
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
