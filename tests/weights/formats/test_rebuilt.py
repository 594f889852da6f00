"""Networks that are rebuilt of what was read compute what their files' programs compute."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from lockstep.backends.tensorflow.certificate import compute
from lockstep.models.architectures import MODELS
from lockstep.weights.formats import keras_file, keras_process
from lockstep.weights.formats.tensorflow_weights import read as read_graph
from lockstep.weights.opened_weights import Weights
from tests.edges import Place
from tests.weights.formats import insertions_keras, insertions_tensorflow

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
Layers = Callable[[Any], Any]
KERAS: dict[str, dict[Place, Layers]] = {
    "plain": {},
    "rescaled": {"before the stem": lambda x: layers.Rescaling(1 / 127.5, offset=-1)(x)},
    "normalised": {
        "before the stem": lambda x: layers.Normalization(mean=[9.0] * 3, variance=[4.0] * 3)(x)
    },
    "with a norm": {"before the classifier": lambda x: layers.BatchNormalization(epsilon=0.1)(x)},
    "with dropout": {"before the classifier": lambda x: layers.Dropout(0.5)(x)},
    "softmax": {"after it": lambda x: layers.Softmax()(x)},
}


def compute_rebuilt(weights: Weights, images: np.ndarray, folder: Path) -> np.ndarray:
    assert weights.original is not None
    folder.mkdir()
    weights.original.write(folder)
    return compute(folder, images)[0]


def build_fixed_pool() -> Any:
    """Return a model whose last pool has the size of its images."""
    model = insertions_keras.resnet(has_top=False)
    x = layers.Flatten()(layers.AveragePooling2D(2)(model.output))
    return insertions_keras.draw_weights(keras.Model(model.input, layers.Dense(5)(x)))


@pytest.mark.parametrize(
    "build",
    [partial(insertions_keras.resnet, inserted) for inserted in KERAS.values()]
    + [build_fixed_pool],
    ids=[*KERAS, "a pool of a fixed size"],
)
def test_keras_layers_are_rebuilt(
    build: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "resnet50-v1", insertions_keras.SPEC)
    monkeypatch.setattr(keras_process, "check", lambda path: None)
    model = build()
    model.save(tmp_path / "a.keras")
    weights = keras_file.read(tmp_path / "a.keras")
    images = insertions_keras.prepare(weights)
    outputs = compute_rebuilt(weights, images, tmp_path / "rebuilt")
    np.testing.assert_allclose(outputs, insertions_keras.compute(model, images), atol=1e-5)


GRAPHS: tuple[insertions_tensorflow.Insertion | None, ...] = (
    None,
    ("after it", "softmax of a temperature"),
    ("after it", "softmax, then backwards"),
)


@pytest.mark.parametrize("insertion", GRAPHS, ids=str)
def test_a_graph_of_tensorflow_is_rebuilt(
    insertion: insertions_tensorflow.Insertion | None, tmp_path: Path
) -> None:
    graph, output = insertions_tensorflow.whole_graph(), "logits"
    if insertion is not None:
        graph, output = insertions_tensorflow.insert(insertion)
    (tmp_path / "graph.pb").write_bytes(graph.SerializeToString())
    weights = read_graph(tmp_path / "graph.pb")
    images = insertions_tensorflow.IMAGES
    outputs = compute_rebuilt(weights, images, tmp_path / "rebuilt")
    expected = insertions_tensorflow.run(graph, output, images)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
