"""Runs from weights whose batch norms are folded into convolutions."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep import backends
from lockstep.data.index import open_index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from tests.inference.cases import random_tensors
from tests.runs.cases import read_notes, read_state, train_and_listen

PAUSE = Execution(stop_after_steps=1, loggers=())
Tensors = dict[str, np.ndarray]


@pytest.fixture
def recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(logits=3, precision="fp32")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """30 training images, all of which are measured."""
    draw_data_set(tmp_path / "data", train_images=30, val_images=6, kinds=("dots", "grid", "rays"))
    return tmp_path / "data"


def fold(recipe: Recipe, tensors: Tensors) -> Tensors:
    """Return the tensors with all batch norms in their convolutions, as exported models have them.

    One channel is dead: its kernel is 0.
    """
    folded = dict(tensors)
    for conv in recipe.spec.list_convolutions():
        scale, bias, mean, variance = (
            tensors[f"{conv.bn_name}.{part}"]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        factor = scale / np.sqrt(variance + recipe.bn_epsilon)
        folded[f"{conv.name}.weight"] = tensors[f"{conv.name}.weight"] * factor[:, None, None, None]
        folded[f"{conv.bn_name}.weight"] = np.ones_like(scale)
        folded[f"{conv.bn_name}.bias"] = bias - mean * factor
        folded[f"{conv.bn_name}.running_mean"] = np.zeros_like(scale)
        folded[f"{conv.bn_name}.running_var"] = np.full_like(scale, 1 - recipe.bn_epsilon)
    folded["conv1.weight"][0] = 0
    return folded


def write_weights(path: Path, recipe: Recipe, tensors: Tensors) -> Path:
    about = {"recipe": recipe.fields(), "classes": ["dots", "grid", "rays"]}
    checkpoint.write_weights(path, tensors, about)
    return path


def load_pixels(data: Path, recipe: Recipe) -> torch.Tensor:
    """Return the training images, normalised: float32 [N, 3, size, size]."""
    index = open_index(data / "train")
    with open_evaluation(index, recipe, Execution(), len(index)) as batches:
        pixels = next(batches).pixels
    normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
    return torch.from_numpy(normalised.astype(np.float32).transpose(0, 3, 1, 2).copy())


def test_folded_weights_train_and_predict(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    folded = fold(recipe, random_tensors(recipe, 2))
    weights = write_weights(tmp_path / "folded.safetensors", recipe, folded)
    run = tmp_path / "run"
    events = train_and_listen(None, images, run, weights=weights, execution=PAUSE)
    note = "folded batch norms get the statistics of 30 training images, which"
    assert any(note in text for text in read_notes(events))
    first = read_state(run, 0).tensors
    norms = np.sqrt(np.square(first["layer1.0.conv1.weight"]).sum(axis=(1, 2, 3)))
    np.testing.assert_allclose(norms, np.sqrt(2), rtol=1e-6)

    with torch.inference_mode():
        pixels = load_pixels(images, recipe)
        load_module = backends.load("torch").load_module
        expected = load_module(recipe, folded)(pixels)
        largest = float(expected.abs().max())
        tolerances = {"rtol": 1e-3, "atol": 1e-3 * largest}
        module = load_module(recipe, first)
        torch.testing.assert_close(module(pixels), expected, **tolerances)
        # Batch norms of a step on the same images have the same statistics.
        torch.testing.assert_close(module.train()(pixels), expected, **tolerances)
        # They had others before.
        difference = load_module(recipe, folded).train()(pixels) - expected
        assert float(difference.abs().max()) > 0.1 * largest


def test_weights_with_batch_norms_are_left_as_they_are(recipe: Recipe, tmp_path: Path) -> None:
    tensors = random_tensors(recipe, 2)
    assert not open_weights(write_weights(tmp_path / "w.safetensors", recipe, tensors)).folded_norms


def test_no_run_resumes_from_folded_weights(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    folded = fold(recipe, random_tensors(recipe, 2))
    weights = write_weights(tmp_path / "folded.safetensors", recipe, folded)
    with pytest.raises(CheckpointError, match=r"folded into convolutions.*--weights"):
        train_and_listen(recipe, images, tmp_path / "run", resume_from=weights)
