"""SavedModels and frozen graphs of Keras' models: computed as Keras computes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.applications.resnet import ResNet, stack_residual_blocks_v1

from lockstep.weights import Weights, open_weights
from lockstep.weights.formats.network_walk import KERAS_ASSUMPTION, KERAS_MEAN
from tests.edges import is_same_answer
from tests.weights.formats.insertions_tensorflow import IMAGES, compute_as_read

prepare = keras.applications.resnet.preprocess_input
Layers = Callable[[Any], Any]


def stack_narrow(x: Any) -> Any:
    for stage, width in enumerate((8, 16, 24, 32), start=2):
        x = stack_residual_blocks_v1(x, width, 1, 1 if stage == 2 else 2, f"conv{stage}")
    return x


def build(before: Layers, after: Layers, kind: str = "float32") -> Any:
    """Return Keras' own ResNet, narrow and shallow, with layers before its stem and after its
    pool, and random weights."""
    image = keras.Input((64, 64, 3), dtype=kind)
    own = {"weights": None, "include_top": False, "pooling": "avg"}
    features = ResNet(stack_narrow, False, True, input_tensor=before(image), **own).output
    model = keras.Model(image, layers.Dense(10, name="predictions")(after(features)))
    random = np.random.default_rng(5)
    for weight in model.weights:
        scale = np.prod(weight.shape[:-1]) ** -0.5 if weight.name == "kernel" else 0.3
        weight.assign(random.uniform(-scale, scale, weight.shape) * 2)
        if weight.name in ("gamma", "moving_variance"):
            weight.assign(random.uniform(0.5, 1.5, weight.shape))
    return model


def compute(model: Any, images: np.ndarray) -> np.ndarray:
    """Return Keras' logits, which differ from image to image."""
    logits = np.asarray(model(images, training=False))
    assert np.ptp(logits, axis=0).max() > 0.1 * np.abs(logits).max()
    return logits


def open_saved(model: Any, folder: Path) -> Weights:
    model.export(str(folder / "saved"), verbose=False)
    return open_weights(folder / "saved")


def open_frozen(model: Any, folder: Path) -> Weights:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    images = tf.TensorSpec([None, *model.input_shape[1:]], model.inputs[0].dtype)
    function = tf.function(lambda x: model(x, training=False)).get_concrete_function(images)
    graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
    (folder / "graph.pb").write_bytes(graph.SerializeToString())
    return open_weights(folder / "graph.pb")


def test_an_export_of_keras_takes_what_its_preprocessing_gives(tmp_path: Path) -> None:
    model = build(layers.Identity(), layers.Dropout(0.5))
    weights = open_saved(model, tmp_path)
    assert is_same_answer(compute(model, prepare(IMAGES.copy())), compute_as_read(weights))
    assert KERAS_ASSUMPTION in weights.remarks
    assert (weights.recipe.mean, weights.preprocessing_from["mean"]) == (KERAS_MEAN, "assumed")


def rescale(x: Any) -> Any:
    x = layers.Rescaling(1 / 127.5, offset=-1)(x)
    return layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[0.5, 1.5, 2.5])(x)


@pytest.mark.parametrize(("before", "kind"), [(rescale, "uint8"), (prepare, "float32")])
def test_preprocessing_in_the_model_is_read(before: Layers, kind: str, tmp_path: Path) -> None:
    model = build(before, layers.BatchNormalization(epsilon=0.01), kind)
    weights = open_frozen(model, tmp_path)
    assert is_same_answer(compute(model, IMAGES), compute_as_read(weights))
    assert {weights.preprocessing_from[name] for name in ("mean", "std")} == {"file"}
    assert {"into mean and std", "into the classifier"} <= {part.reason for part in weights.parts}
