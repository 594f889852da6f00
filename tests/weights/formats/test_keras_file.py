"""Files that Keras' own ResNet50 writes and loads: its logits are the oracle."""

import importlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lockstep import backends
from lockstep.models.architectures import MODELS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.weights import Weights
from lockstep.weights.fingerprints import compute_fingerprints
from lockstep.weights.formats import keras_variables
from lockstep.weights.formats.keras_file import find, read, write_keras
from lockstep.weights.weights_choice import WeightsChoice
from tests.lines import check_lines
from tests.soak import SOAK
from tests.weights.formats.cases import EVALUATION, assert_canonical

# Keras, with NumPy 2.
pytestmark = [
    pytest.mark.usefixtures("unchecked_keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
LOGITS = 10
ASSUMES = "its layers are those of Keras' ResNets, so it is assumed that images are as"
BIASES = "biases of convolutions were subtracted from the running means, which is equivalent"
FILES = ("model.keras", "model.h5", "model.weights.h5")


@dataclass(frozen=True)
class Keras:
    """A model of Keras with random values, its files, and its logits for some images."""

    folder: Path
    images: np.ndarray
    """RGB from 0 to 255, [N, H, W, 3]."""
    inputs: np.ndarray
    """The images as Keras preprocesses them."""
    logits: np.ndarray


def resnet50(**options: Any) -> Any:
    import keras

    return keras.applications.ResNet50(
        input_shape=(64, 64, 3), classifier_activation=None, **options
    )


@pytest.fixture(scope="module", autouse=not SOAK)
def narrow_resnet50() -> Iterator[None]:
    """Give ResNet-50 an eighth of its width behind the stem, Keras' and ours. All of its layers
    stay, and their names."""
    resnet = importlib.import_module("keras.src.applications.resnet")
    stack = resnet.stack_residual_blocks_v1

    def stack_narrow(x: Any, filters: int, *others: Any, **options: Any) -> Any:
        return stack(x, filters // 8, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "stack_residual_blocks_v1", stack_narrow)
        for name in ("resnet50", "resnet50-v1"):
            patch.setitem(MODELS, name, replace(MODELS[name], widths=(8, 16, 32, 64)))
        yield


@pytest.fixture(scope="module")
def keras_files(tmp_path_factory: pytest.TempPathFactory) -> Keras:
    """Keras' ResNet50 in all its kinds of files. Tests must only read them."""
    import keras

    random = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("keras")
    model = resnet50(weights=None, classes=LOGITS)
    for layer in model.layers:
        values = layer.get_weights()
        if len(values) == 4:  # a batch norm: all of its values differ from each other
            size = values[0].size
            values = [
                random.uniform(0.5, 1.5, size),
                random.normal(0, 0.3, size),
                random.normal(0, 0.3, size),
            ]
            values.append(random.uniform(0.5, 1.5, size))
        elif values:
            values[1] = random.normal(0, 0.3, values[1].size)
            # Twice Glorot's limit, drawn here: with some of Keras' own draws the logits of the
            # images are nearly equal.
            ends = values[0].size * (1 / values[0].shape[-1] + 1 / values[0].shape[-2])
            values[0] = random.uniform(
                -2 * (6 / ends) ** 0.5, 2 * (6 / ends) ** 0.5, values[0].shape
            )
        layer.set_weights(values)
    for name in FILES:
        (model.save_weights if name.endswith(".weights.h5") else model.save)(folder / name)
    headless = keras.Model(model.input, model.get_layer("avg_pool").output)
    headless.save(folder / "headless.h5")
    images = np.repeat(
        np.repeat(random.integers(0, 256, (3, 4, 4, 3)), 16, axis=1), 16, axis=2
    ).astype(np.float32)
    inputs = keras.applications.resnet.preprocess_input(images.copy())
    return Keras(folder, images, inputs, np.asarray(model(inputs)))


@pytest.fixture(scope="module")
def original(keras_files: Keras) -> Weights:
    return read(keras_files.folder / "model.keras")


def logits(original: Weights, images: np.ndarray) -> np.ndarray:
    """Return the reference's logits of RGB images from 0 to 255."""
    module = backends.load("reference").load_module(original.recipe, original.state.tensors)
    return module(
        ((images - original.recipe.mean) / original.recipe.std)
        .transpose(0, 3, 1, 2)
        .astype(np.float64)
    )


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.ptp(expected, axis=0).max() > 0.1 * np.abs(expected).max(), "images are told apart"
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
def test_a_model_of_keras_has_its_logits(keras_files: Keras, original: Weights) -> None:
    assert_close(logits(original, keras_files.images), keras_files.logits)
    recipe = original.recipe
    assert recipe.model == "resnet50-v1"
    assert (recipe.logits, recipe.bn_epsilon, recipe.precision) == (LOGITS, 1.001e-5, "fp32")
    assert (original.origin, original.state.step, original.state.momentum) == ("Keras", 0, {})
    assert original.remarks[0].startswith(ASSUMES)
    assert original.remarks[1:] == (BIASES,)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES[1:])
def test_all_files_have_the_same_weights(name: str, keras_files: Keras, original: Weights) -> None:
    assert find(keras_files.folder / name) == keras_files.folder / name
    weights = read(keras_files.folder / name)
    assert weights.recipe.replace(**EVALUATION) == original.recipe.replace(**EVALUATION)
    assert weights.remarks[:2] == original.remarks
    is_described = not any("it holds only weights" in remark for remark in weights.remarks)
    assert is_described == (name == "model.h5")
    assert_canonical(weights.state.tensors, original.state.tensors)


def forget_names(layers: Any) -> None:
    for layer in layers.values():
        del layer["vars"].attrs["name"]


def rename_classifier(layers: Any) -> None:
    """Give another name to the only dense layer, which is the classifier in any case."""
    layers["dense/vars"].attrs["name"] = "cats_and_dogs"


@pytest.mark.slow
@pytest.mark.parametrize("change", [forget_names, rename_classifier])
def test_layers_may_have_other_names_or_none(
    change: Callable[[Any], None], keras_files: Keras, original: Weights, tmp_path: Path
) -> None:
    shutil.copy(keras_files.folder / "model.weights.h5", tmp_path / "a")
    with h5py.File(tmp_path / "a", "r+") as file:
        change(file["layers"])
    assert_canonical(read(tmp_path / "a").state.tensors, original.state.tensors)


@pytest.mark.slow
def test_a_headless_model_has_all_other_tensors(keras_files: Keras, original: Weights) -> None:
    weights = read(keras_files.folder / "headless.h5")
    assert not weights.has_classifier
    assert "it has no classifier" in weights.remarks
    without = {
        name: value for name, value in original.state.tensors.items() if not name.startswith("fc.")
    }
    assert_canonical(weights.state.tensors, without)


@pytest.mark.slow
def test_a_layer_more_refuses_a_file_of_weights(keras_files: Keras, tmp_path: Path) -> None:
    for name, layer in (
        ("batch_normalization_53", "user_norm"),
        ("dense_1", "user_dense"),
        ("normalization", "user_means"),
        ("rescaling", "user_scale"),
        ("batch_normalization_53", None),  # the names of all layers are missing
    ):
        shutil.copy(keras_files.folder / "model.weights.h5", tmp_path / "a")
        with h5py.File(tmp_path / "a", "r+") as file:
            if layer is None:
                for others in file["layers"].values():
                    others["vars"].attrs.pop("name", None)
            group = file.create_group(f"layers/{name}/vars")
            if layer is not None:
                group.attrs["name"] = layer
            for i in range({"dense_1": 2, "rescaling": 0}.get(name, 4)):
                group[f"{i}"] = np.zeros((64, 5)[i:] if name == "dense_1" else 64, np.float32)
        leftover = layer or f"layers/{name}"
        with pytest.raises(CheckpointError, match=f"would ignore: {leftover}"):
            read(tmp_path / "a")
        ignored = WeightsChoice(ignore=(f"{leftover}*",))
        parts = read(tmp_path / "a", choice=ignored).parts
        assert {part.treatment for part in parts} == {"ignored"}


def describe_layers(keras_files: Keras, path: Path, **layers: dict[str, Any]) -> Path:
    """Write the model's file with other configurations of some layers."""
    shutil.copy(keras_files.folder / "model.h5", path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        listed = config["config"]["layers"]
        for name, changes in layers.items():
            for layer in listed:
                if layer["config"]["name"] == name:
                    layer["config"] |= changes
        file.attrs["model_config"] = json.dumps(config)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"conv1_bn": {"epsilon": 1e-3}}, r"epsilons \[1\.001e-05, 0\.001\]"),
        ({"conv3_block1_1_conv": {"strides": [3, 3]}}, r"conv3_block1_1_conv' is padded|stride"),
    ],
)
def test_a_description_of_another_model_is_refused(
    layers: dict[str, dict[str, Any]], reason: str, keras_files: Keras, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read(describe_layers(keras_files, tmp_path / "a", **layers))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_converted_exactly(dtype: str, tmp_path: Path) -> None:
    import keras

    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, dtype=keras.DTypePolicy(dtype), name="head")]
    )
    model.save_weights(tmp_path / "a.weights.h5")
    expected = np.asarray(model.get_weights()[0]).astype(np.float32)
    with keras_variables.open_variables(tmp_path / "a.weights.h5") as variables:
        kernel = variables.list_names()["head/kernel"]
        array = variables.read(kernel)
        assert variables.find_type(kernel) == dtype
    assert (array.dtype, array.tobytes()) == (np.float32, expected.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w.h5", "w.weights.h5"])
def test_keras_loads_what_is_written(
    name: str,
    keras_files: Keras,
    original: Weights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras

    from lockstep.backends.tensorflow import certificate

    build = keras.applications.ResNet50
    built = []

    def small(**options: Any) -> Any:
        built.append(build(input_shape=(64, 64, 3), **options))
        return built[0]

    written = write_keras(tmp_path / name, original.recipe, original.state)
    assert (written.files, len(written.remarks)) == ((tmp_path / name,), 1)
    monkeypatch.setattr(keras.applications, "ResNet50", small)
    weights = certificate.read(tmp_path / name, original.recipe)
    assert_close(np.asarray(built[0](keras_files.inputs)), keras_files.logits)
    with keras_variables.open_variables(tmp_path / name) as variables:
        stored = {key: variables.read(place) for key, place in variables.list_names().items()}
    assert compute_fingerprints(weights) == compute_fingerprints(stored)
    assert_canonical(read(tmp_path / name).state.tensors, original.state.tensors)


@pytest.mark.slow
def test_epsilon_and_std_are_folded(keras_files: Keras, original: Weights, tmp_path: Path) -> None:
    recipe = original.recipe.replace(bn_epsilon=1e-2, std=(0.9, 1.1, 1.3))
    expected = logits(Weights(recipe, original.state, (), Path(), ""), keras_files.images)
    remarks = write_keras(tmp_path / "w.h5", recipe, original.state).remarks
    assert any("scales of batch norm were changed" in remark for remark in remarks)
    assert_close(logits(read(tmp_path / "w.h5"), keras_files.images), expected)


@pytest.mark.slow
def test_what_a_file_cannot_hold_is_remarked_upon(original: Weights, tmp_path: Path) -> None:
    tensors = original.state.tensors
    recipe = original.recipe.replace(mean=(123.675, 116.28, 103.53))
    remarks = write_keras(tmp_path / "w.h5", recipe, State(7, tensors, {})).remarks
    assert (
        "trained with the mean [123.675, 116.28, 103.53] of RGB; preprocess_input subtracts"
        in remarks[1]
    )
    check_lines(remarks[2:], "^left out.*: step 7$")
    with pytest.raises(CheckpointError, match=r"w\.h5 already exists"):
        write_keras(tmp_path / "w.h5", recipe, original.state)


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"model": "resnet50"}, "w.h5", "has no resnet50"),
        ({"padding": "same"}, "w.h5", "pads symmetrically"),
        ({}, "w.keras", r"expected a name that ends in \.weights\.h5 or \.h5"),
    ],
)
def test_what_keras_cannot_take_is_not_written(
    changes: dict[str, Any], name: str, reason: str, tmp_path: Path
) -> None:
    recipe = Recipe(model="resnet50-v1", logits=LOGITS).replace(**changes)
    with pytest.raises(CheckpointError, match=reason):
        write_keras(tmp_path / name, recipe, State(0, {}, {}))
    assert list(tmp_path.iterdir()) == []


def small_file(path: Path, **changes: np.ndarray | None) -> None:
    """Write a few variables in the older layout; others are added, or removed if they are None."""
    arrays = {
        "conv1_conv/kernel": np.zeros((7, 7, 3, 64), np.float32),
        "conv1_bn/beta": np.zeros(64, np.float32),
    }
    with h5py.File(path, "w") as file:
        for name, values in (arrays | changes).items():
            layer, variable = name.split("/")
            if values is not None:
                file.create_dataset(f"{layer}/{layer}/{variable}:0", data=values)


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    small_file(tmp_path / "a.h5")
    expected = r"is not a complete ResNet as Keras .*'conv1_bn/beta', 'conv1_conv/kernel'"
    with pytest.raises(CheckpointError, match=expected):
        read(tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["/etc/weights", "../weights", "C:/weights", "a\\..\\..\\weights"])
def test_members_outside_of_an_archive_are_refused(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        for member in ("config.json", "model.weights.h5", name):
            archive.writestr(member, b"")
    with pytest.raises(CheckpointError, match="leaves the archive"):
        read(tmp_path / "a.keras")


def test_other_files_are_not_of_keras(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    (tmp_path / "a.hdf5").write_bytes(b"not HDF5")
    (tmp_path / "a.keras").mkdir()
    for name in ("a.pth", "a.hdf5", "a.keras", "missing.keras"):
        assert find(tmp_path / name) is None


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_file(tmp_path / "a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(BackendError, match="pip install h5py=="):
        read(tmp_path / "a.h5")
