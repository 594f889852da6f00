"""Models that files of Keras describe: what Keras computes is what is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import pytest
from keras import layers

from lockstep.models.architectures import MODELS
from lockstep.weights import Weights
from lockstep.weights.formats import keras_process
from lockstep.weights.formats.keras_file import read
from lockstep.weights.weights_choice import WeightsChoice
from tests.edges import is_same_answer
from tests.weights.formats.insertions_keras import (
    CLASSES,
    SIZE,
    SPEC,
    compute,
    compute_as_read,
    draw_weights,
    prepare,
    resnet,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation:DeprecationWarning"
    ),  # Keras, with NumPy 2
]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet50-v1", SPEC)
    monkeypatch.setattr(keras_process, "check", lambda path: None)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The network alone. Tests must only read it."""
    return resnet()


def transfer(*head: Any, before: Any = None) -> Any:
    """Return a model with a model without its classifier in it, and another classifier on top."""
    image = keras.Input((SIZE, SIZE, 3))
    x = image if before is None else before(image)
    x = resnet(has_top=False)(x, training=False)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    for layer in head or (layers.Dense(CLASSES, activation="softmax"),):
        x = layer(x)
    return draw_weights(keras.Model(image, x))


def assert_read(model: Any, file: Path, choice: WeightsChoice | None = None) -> Weights:
    """Return the weights of a file, which compute what the model computes."""
    weights = read(file, choice=choice or WeightsChoice())
    assert is_same_answer(compute(model, prepare(weights)), compute_as_read(weights))
    return weights


def save(model: Any, folder: Path, ending: str = "keras") -> Path:
    file = folder / f"a.{ending}"
    (model.save_weights if ending == "weights.h5" else model.save)(file)
    return file


def edit_description(file: Path, edit: Edit) -> None:
    """Change the configuration in an `.h5`."""
    with h5py.File(file, "r+") as opened_file:
        config = json.loads(opened_file.attrs["model_config"])
        edit(config)
        opened_file.attrs["model_config"] = json.dumps(config)


def test_layers_for_preprocessing_are_read_as_mean_and_std(tmp_path: Path) -> None:
    for layer, mean, std in (
        (layers.Rescaling(1 / 127.5, offset=-1), 127.5, 127.5),
        (layers.Rescaling(1 / 255), 0, 255),
    ):
        model = resnet({"before the stem": layer})
        weights = assert_read(model, save(model, tmp_path))
        assert (weights.recipe.mean, weights.recipe.std) == ((mean,) * 3, (std,) * 3)
        assert weights.stated == {"mean", "std"}


def test_preprocess_input_in_a_model_is_read(tmp_path: Path) -> None:
    augment = keras.Sequential([layers.RandomFlip(), layers.RandomRotation(0.1)], name="augment")
    model = transfer(before=lambda x: keras.applications.resnet.preprocess_input(augment(x)))
    weights = assert_read(model, save(model, tmp_path))
    assert weights.recipe.mean == (123.68, 116.779, 103.939)
    assert weights.stated == {"mean", "std"}
    assert [part.treatment for part in weights.parts].count("without effect") == 3


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_models_in_a_model_are_read(ending: str, tmp_path: Path) -> None:
    model = transfer(layers.BatchNormalization(epsilon=0.1), layers.Dense(CLASSES))
    weights = assert_read(model, save(model, tmp_path, ending))
    assert any("BatchNormalization 'batch_norm" in part.name for part in weights.parts)
    chain = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.Sequential([layers.Rescaling(1 / 255), layers.RandomFlip()]),
            resnet(),
            layers.Softmax(),
        ]
    )
    weights = assert_read(chain, save(chain, tmp_path, ending))
    assert weights.recipe.std == (255.0, 255.0, 255.0)
