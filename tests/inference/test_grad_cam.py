"""Grad-CAM, compared with its closed form, and the pictures of it; features before the classifier,
compared with the PyTorch module without its classifier."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep import backends
from lockstep.backends.shared.explained_stage import choose_stage
from lockstep.inference.embeddings import write_embeddings
from lockstep.inference.grad_cam import make_explainer, overlay
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from lockstep.weights import Weights, open_weights
from tests.inference.cases import MEAN, STD, image_file, pictures, prepare_photo, save_random

BACKENDS = pytest.mark.parametrize(
    "backend", [name for name, framework in backends.FRAMEWORKS.items() if framework.explains]
)


def compute_heat(
    weights: Weights, backend: str, images: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    if backends.FRAMEWORKS[backend].version() is None:
        pytest.skip(f"{backend} is not installed")
    world = backends.load(backend).world(Execution(backend=backend))
    return make_explainer(weights, backend, world).heat(images, classes)


@BACKENDS
@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_grad_cam_of_an_average_and_a_linear_layer_is_the_class_activation_map(
    padding: str, backend: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    weights = open_weights(
        save_random(tiny_recipe.replace(mean=MEAN, std=STD, padding=padding), tmp_path)
    )
    images = pictures(128, 160)
    classes = np.array([3, 0, 9])
    heat = compute_heat(weights, backend, images, classes)

    kept: list[torch.Tensor] = []
    module = lockstep.load(weights.source).module()
    module.layer4.register_forward_hook(lambda _, inputs, output: kept.append(output))
    with torch.inference_mode():
        module(torch.from_numpy(((images - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2)))
    activations = kept[0].double().numpy()
    of_class = weights.tensors["fc.weight"].astype(np.float64)[classes]
    expected = np.einsum("nc,nchw->nhw", of_class, activations) / (
        activations.shape[2] * activations.shape[3]
    )
    assert expected.shape == (3, 4, 5)
    assert (expected > 0).any()
    assert (expected < 0).any()
    np.testing.assert_allclose(
        heat, np.maximum(expected, 0), rtol=1e-4, atol=1e-6 * np.abs(expected).max()
    )


@BACKENDS
def test_small_images_use_earlier_stages(backend: str, tiny_recipe: Recipe, tmp_path: Path) -> None:
    """Compare with differences of the logits where a channel is raised everywhere, in float64."""
    weights = open_weights(save_random(tiny_recipe.replace(mean=MEAN, std=STD), tmp_path))
    images = pictures(32, 32)
    classes = np.array([3, 0, 9])
    heat = compute_heat(weights, backend, images, classes)

    module = lockstep.load(weights.source).module().double()
    raised = torch.zeros(1, dtype=torch.float64)
    kept: list[torch.Tensor] = []

    def raise_channel(_: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        kept.append(output)
        return output + raised

    module.layer2.register_forward_hook(raise_channel)
    pixels = torch.from_numpy(((images - MEAN) / STD).transpose(0, 3, 1, 2))
    slopes = []
    with torch.inference_mode():
        module(pixels)
        activations = kept[0].numpy()
        for channel in range(activations.shape[1]):
            logits = []
            for step in (-1e-6, 1e-6):
                raised = torch.zeros(1, activations.shape[1], 1, 1, dtype=torch.float64)
                raised[0, channel] = step
                logits.append(module(pixels).numpy()[range(3), classes])
            slopes.append((logits[1] - logits[0]) / 2e-6)
    assert heat.shape == (3, 4, 4)
    expected = np.einsum("cn,nchw->nhw", np.array(slopes), activations) / 16
    np.testing.assert_allclose(
        heat, np.maximum(expected, 0), rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )


def test_the_last_stage_with_four_places_a_side_is_chosen() -> None:
    for side in range(32, 260):
        places = {stage: -(-side // 2 ** (stage + 1)) for stage in (1, 2, 3, 4)}
        assert choose_stage(side) == max(stage for stage in places if places[stage] >= 4)


def test_heat_colours_the_pixels_below_it_and_no_others() -> None:
    images = np.full((2, 64, 64, 3), 100, np.uint8)
    heat = np.zeros((2, 2, 2), np.float32)
    heat[1, 0, 1] = 7
    cold, warm = overlay(images, heat)
    np.testing.assert_array_equal(cold, images[0])
    np.testing.assert_array_equal(warm[50:, :10], images[1, 50:, :10])
    assert (warm[5, 60] != 100).all()


def test_an_engine_without_gradients_names_others(tiny_recipe: Recipe, tmp_path: Path) -> None:
    model = lockstep.load(save_random(tiny_recipe, tmp_path)).on("reference")
    with pytest.raises(BackendError, match=r"reference .* --backend jax or torch"):
        model.predict(np.zeros((40, 40, 3), np.uint8), explain=True)


def test_an_explanation_changes_no_prediction(tiny_recipe: Recipe, tmp_path: Path) -> None:
    source = save_random(tiny_recipe, tmp_path)
    path = image_file(tmp_path, 50, 50)
    with lockstep.load(source) as model:
        prediction = model.predict(path, explain=True, features=True)
    plain = lockstep.load(source).predict(path)
    assert prediction.classes == plain.classes
    assert prediction.probabilities == pytest.approx(plain.probabilities, rel=1e-5)
    assert prediction.explanation is not None
    assert (prediction.explanation.dtype, prediction.explanation.shape) == (np.uint8, (32, 32, 3))


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
