"""Files with the names that Keras' ResNet50 had until 2018. Keras computes the expected logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lockstep import backends
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats.keras_file import read

pytestmark = [
    pytest.mark.slow,
    # Keras, with NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
SPEC = ModelSpec(
    block="bottleneck", layers=(2, 1, 1, 1), stem_width=8, widths=(8, 16, 32, 64), stride_in="1x1"
)
OF_KERAS_1 = {
    "kernel": "W",
    "bias": "b",
    "moving_mean": "running_mean",
    "moving_variance": "running_std",
}


@dataclass(frozen=True)
class Old:
    """A model of Keras with old names, its files, and its logits for some images."""

    whole: Path
    weights: Path
    images: np.ndarray
    """RGB from 0 to 255, [N, H, W, 3]."""
    logits: np.ndarray


def unit(x: Any, name: str, outputs: int, size: int = 1, stride: int = 1) -> Any:
    from keras import layers

    x = layers.Conv2D(
        outputs, size, stride, padding="same" if size == 3 else "valid", name=f"res{name}"
    )(x)
    return layers.BatchNormalization(name=f"bn{name}")(x)


def old_model() -> Any:
    """Return the network of 2018, as narrow as `SPEC`. Batch norms have Keras' default epsilon."""
    import keras
    from keras import layers

    x = start = keras.Input((64, 64, 3))
    x = layers.Conv2D(8, 7, 2, name="conv1")(layers.ZeroPadding2D(3, name="conv1_pad")(x))
    x = layers.ReLU()(layers.BatchNormalization(name="bn_conv1")(x))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1, name="pool1_pad")(x))
    for block, width in {"2a": 8, "2b": 8, "3a": 16, "4a": 32, "5a": 64}.items():
        stride = 2 if block in ("3a", "4a", "5a") else 1
        y = layers.ReLU()(unit(x, f"{block}_branch2a", width, 1, stride))
        y = layers.ReLU()(unit(y, f"{block}_branch2b", width, 3))
        y = unit(y, f"{block}_branch2c", 4 * width)
        x = unit(x, f"{block}_branch1", 4 * width, 1, stride) if block.endswith("a") else x
        x = layers.ReLU()(layers.Add()([y, x]))
    return keras.Model(start, layers.Dense(10, name="fc1000")(layers.GlobalAveragePooling2D()(x)))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Old:
    """The model as `model.save` writes it, and its weights as the `save_weights` of these years
    wrote them."""
    import keras

    folder = tmp_path_factory.mktemp("old")
    random = np.random.default_rng(3)
    model = old_model()
    for layer in model.layers:
        values = layer.get_weights()
        if len(values) == 4:  # a batch norm; its variances are so small that epsilon matters
            values = [
                random.uniform(0.5, 1.5, values[0].size),
                *(random.normal(0, 0.3, (2, values[0].size))),
            ]
            values.append(random.uniform(0.05, 0.5, values[0].size))
        elif values:
            values[1] = random.normal(0, 0.3, values[1].size)
        layer.set_weights(values)
    model.save(folder / "whole.h5")
    with h5py.File(folder / "whole.h5") as whole, h5py.File(folder / "weights.h5", "w") as weights:
        for name in whole["model_weights"]:
            whole.copy(f"model_weights/{name}", weights)
    images = np.repeat(
        np.repeat(random.integers(0, 256, (3, 4, 4, 3)), 16, axis=1), 16, axis=2
    ).astype(np.float32)
    logits = np.asarray(model(keras.applications.resnet.preprocess_input(images.copy())))
    return Old(folder / "whole.h5", folder / "weights.h5", images, logits)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet50-v1", SPEC)


def convert_to_keras_1(source: Path, target: Path) -> None:
    """Write a file of weights with the variables' names of Keras 1, such as `conv1_W` in the group
    `conv1`."""
    with h5py.File(source) as file, h5py.File(target, "w") as renamed:
        for layer in file:
            for variable, values in file.get(f"{layer}/{layer}", {}).items():
                kind = variable.removesuffix(":0")
                renamed[f"{layer}/{layer}_{OF_KERAS_1.get(kind, kind)}:0"] = values[...]
            renamed.require_group(layer).attrs["weight_names"] = [
                name.encode() for name in renamed.get(layer, ())
            ]


@pytest.mark.parametrize("kind", ["whole", "weights", "of Keras 1"])
def test_a_resnet50_with_old_names_has_its_logits(kind: str, old: Old, tmp_path: Path) -> None:
    convert_to_keras_1(old.weights, tmp_path / "keras-1.h5")
    weights = read(
        {"whole": old.whole, "weights": old.weights, "of Keras 1": tmp_path / "keras-1.h5"}[kind]
    )
    assert weights.recipe.model == "resnet50-v1"
    assert (weights.recipe.logits, weights.recipe.bn_epsilon) == (10, 1e-3)
    module = backends.load("reference").load_module(weights.recipe, weights.state.tensors)
    images = (old.images - weights.recipe.mean) / weights.recipe.std
    difference = np.abs(module(images.transpose(0, 3, 1, 2).astype(np.float64)) - old.logits).max()
    assert difference < 1e-4 * np.abs(old.logits).max()
    assert np.ptp(old.logits, axis=0).max() > 0.1 * np.abs(old.logits).max(), (
        "images are told apart"
    )
    assert any("without a layer pool1_pad" in remark for remark in weights.remarks) == (
        kind != "whole"
    )


def test_names_of_several_versions_in_one_file_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "both.h5", "w") as file:
        for name in ("res2a_branch2a/kernel:0", "conv1/kernel:0", "conv1/conv1_W:0"):
            file[name] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match="several versions of Keras"):
        read(tmp_path / "both.h5")
