"""Features before the classifier, compared with the PyTorch module without its classifier."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep.inference.embeddings import write_embeddings
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from tests.inference.cases import image_file, prepare_photo, save_random


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    return [image_file(tmp_path, 40, 36 + i) for i in range(3)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_engine_gives_the_features_that_its_classifier_receives(
    backend: str, tiny_recipe: Recipe, images: list[Path], tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(class_weights=[1.0] * tiny_recipe.logits)
    source = save_random(recipe, tmp_path)
    how = Execution(backend=backend)
    with lockstep.load(source).on(execution=how) as predictor:
        predictions = list(predictor.predict(images, top=3, features=True))
        logits = list(predictor.logits(images))
    module = lockstep.load(source).module()
    module.fc = torch.nn.Identity()
    with torch.inference_mode():
        expected = module(
            torch.from_numpy(np.concatenate([prepare_photo(path, tiny_recipe) for path in images]))
        ).numpy()
    for prediction, row in zip(predictions, expected, strict=True):
        assert prediction.features is not None
        assert prediction.features.dtype == np.float32
        np.testing.assert_allclose(prediction.features, row, rtol=1e-4, atol=1e-5)
    plain = list(lockstep.load(source).on(execution=how).predict(images, top=3))
    assert [item.classes for item in predictions] == [item.classes for item in plain]
    with lockstep.load(source).on(execution=how) as predictor:
        np.testing.assert_allclose(logits, list(predictor.logits(images)), rtol=1e-5, atol=1e-6)


def test_quantised_features(tiny_recipe: Recipe, images: list[Path], tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8")
    source = save_random(recipe, tmp_path, dict.fromkeys(layers(recipe.spec), 0.05))
    with lockstep.load(source) as predictor:
        for prediction in predictor.predict(images, features=True):
            assert prediction.features is not None
            steps = prediction.features / 0.05
            assert np.abs(steps - np.rint(steps)).max() < 1e-4
            assert np.abs(steps).max() > 1


def test_a_file_of_embeddings_is_read_by_numpy(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    rows = np.random.default_rng(1).standard_normal((5000, 7), np.float32)
    names = [f"images/{'ü' * (i % 90)}{i}.jpg" for i in range(len(rows))]
    with write_embeddings(path, 7) as file:
        for name, row in zip(names, rows, strict=True):
            file.add(name, row)
        assert not path.exists()
    with np.load(path) as arrays:
        assert sorted(arrays.files) == ["features", "paths"]
        np.testing.assert_array_equal(arrays["features"], rows)
        assert arrays["features"].dtype == np.float32
        assert arrays["paths"].tolist() == names
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_a_file_of_no_embeddings_has_no_rows(tmp_path: Path) -> None:
    with write_embeddings(tmp_path / "out.npz", 7):
        pass
    with np.load(tmp_path / "out.npz") as arrays:
        assert (arrays["features"].shape, arrays["paths"].shape) == ((0, 7), (0,))


def test_after_an_error_there_is_no_file_of_embeddings(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), write_embeddings(tmp_path / "out.npz", 1):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
