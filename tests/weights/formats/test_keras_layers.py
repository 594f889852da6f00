"""Models that files of Keras describe: what Keras computes is what is read."""

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from lockstep.models.architectures import MODELS
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats.keras_file import read
from lockstep.weights.weights_choice import WeightsChoice
from tests.edges import is_same_answer
from tests.weights.formats.insertions_keras import (
    CLASSES,
    IMAGES,
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
    # Keras, with NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def quick(unchecked_keras: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet50-v1", SPEC)


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
        assert weights.stated == {"mean", "std", "eval_crop"}


def test_preprocess_input_in_a_model_is_read(tmp_path: Path) -> None:
    augment = keras.Sequential([layers.RandomFlip(), layers.RandomRotation(0.1)], name="augment")
    model = transfer(before=lambda x: keras.applications.resnet.preprocess_input(augment(x)))
    weights = assert_read(model, save(model, tmp_path))
    assert weights.recipe.mean == (123.68, 116.779, 103.939)
    assert weights.stated == {"mean", "std", "eval_crop"}
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


def test_one_sigmoid_is_read_as_two_classes(tmp_path: Path) -> None:
    model = transfer(layers.Dense(1, activation="sigmoid"))
    logits = compute_as_read(assert_read(model, save(model, tmp_path)))
    assert logits.shape == (len(IMAGES), 2)
    assert not logits[:, 0].any()


def list_layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    return config["config"]["layers"]


def as_in_keras_2(config: dict[str, Any]) -> None:
    """Change a description to the form of Keras 2, which counts calls of models from 1."""
    models = {layer["name"] for layer in list_layers(config) if layer["class_name"] == "Functional"}

    def link(tensor: dict[str, Any]) -> list[Any]:
        name, call, number = tensor["config"]["keras_history"]
        return [name, call + (name in models), number]

    for layer in list_layers(config):
        nodes = []
        for node in layer["inbound_nodes"]:
            tensors = node["args"][0]
            tensors = tensors if isinstance(tensors, list) else [tensors]
            settings = {name: item for name, item in node["kwargs"].items() if item is not None}
            nodes.append([[*link(tensor), settings] for tensor in tensors])
        layer["inbound_nodes"] = nodes
        if layer["class_name"] == "InputLayer":
            layer["config"]["batch_input_shape"] = layer["config"].pop("batch_shape")
        if layer["class_name"] in models or layer["name"] in models:
            as_in_keras_2(layer)
    inner = config["config"]
    for name in ("input_layers", "output_layers"):
        inner[name] = [inner[name]]


def prepare_by_functions(config: dict[str, Any]) -> None:
    """Insert `preprocess_input` as TensorFlow's functions, as tf.keras wrote it."""
    as_in_keras_2(config)
    image, first, *others = list_layers(config)
    backwards = [{"class_name": "__ellipsis__"}, {"start": None, "stop": None, "step": -1}]
    means = [-103.939, -116.779, -123.68]
    inserted = [
        ("SlicingOpLambda", "__operators__.getitem", {"slice_spec": backwards}),
        ("TFOpLambda", "nn.bias_add", {"bias": means, "data_format": "NHWC", "name": None}),
    ]
    value = image["name"]
    made = []
    for kind, function, settings in inserted:
        made.append(
            {
                "class_name": kind,
                "name": f"tf.{function}",
                "config": {"name": f"tf.{function}", "function": function},
                "inbound_nodes": [[value, 0, 0, settings]],
            }
        )
        value = f"tf.{function}"
    first["inbound_nodes"] = [[[value, 0, 0, {}]]]
    config["config"]["layers"] = [image, *made, first, *others]


def test_descriptions_of_keras_2_are_read(plain: Any, tmp_path: Path) -> None:
    file = save(plain, tmp_path, "h5")
    edit_description(file, as_in_keras_2)
    assert_read(plain, file)


def test_a_description_of_keras_2_with_a_model_in_it_is_read(tmp_path: Path) -> None:
    model = transfer()
    file = save(model, tmp_path, "h5")
    edit_description(file, as_in_keras_2)
    assert_read(model, file)


def test_functions_of_tensorflow_for_preprocessing_are_read(plain: Any, tmp_path: Path) -> None:
    file = save(plain, tmp_path, "h5")
    edit_description(file, prepare_by_functions)
    weights = read(file)
    assert weights.stated == {"mean", "std", "eval_crop"}
    assert weights.recipe.mean == (123.68, 116.779, 103.939)
    images = keras.applications.resnet.preprocess_input(IMAGES.copy())
    assert is_same_answer(compute(plain, images), compute_as_read(weights))


def move_weights(file: Path, place: Callable[[str], str]) -> None:
    """Write the arrays of an archive under other paths, and without the names of layers."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    moved = io.BytesIO()
    with h5py.File(io.BytesIO(members["model.weights.h5"])) as old, h5py.File(moved, "w") as new:

        def move(path: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                new[place(path)] = item[()]

        old.visititems(move)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in (members | {"model.weights.h5": moved.getvalue()}).items():
            archive.writestr(name, data)


def count_twice(match: re.Match[str]) -> str:
    number = 2 * int((match[2] or "_0")[1:])
    return f"layers/{match[1]}{f'_{number}' if number else ''}/vars"


@pytest.mark.parametrize(
    "place",
    [
        str,
        lambda path: path.replace("layers", "_layer_checkpoint_dependencies"),
        lambda path: re.sub("layers/([a-z0-9_]*?)(_[0-9]+)?/vars", count_twice, path),
    ],
    ids=["Keras 3", "Keras 2.12", "counts with gaps"],
)
def test_numbered_arrays_are_found(place: Callable[[str], str], tmp_path: Path) -> None:
    model = transfer(layers.BatchNormalization(), layers.Dense(7), layers.Dense(CLASSES))
    file = save(model, tmp_path)
    move_weights(file, place)
    assert_read(model, file)


@keras.saving.register_keras_serializable(package="mine")
class Conv2D(layers.Conv2D):
    """A layer with the name of one of Keras'."""

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * 2


class Own(keras.Model):
    """A model whose layers only its code says."""


def test_layers_of_others_are_refused_by_name(tmp_path: Path) -> None:
    for layer, name in (
        (Conv2D(3, 1, name="user_conv"), "layer Conv2D 'user_conv'"),
        (layers.Lambda(lambda x: x, name="user_code"), "layer Lambda 'user_code'"),
        (layers.Resizing(SIZE, SIZE, name="user_size"), "layer Resizing 'user_size'"),
    ):
        file = save(resnet({"before the stem": layer}), tmp_path)
        with pytest.raises(CheckpointError, match=f"used by {name}.*--ignore user_"):
            read(file)
    weights = read(file, choice=WeightsChoice(ignore=("user_*",)))
    assert [(part.name, part.treatment) for part in weights.parts] == [("user_size", "ignored")]
    own = Own()
    own.built = True
    with pytest.raises(CheckpointError, match="it is a Own, whose code is not in the file"):
        read(save(own, tmp_path))


def test_layers_called_as_in_training_are_refused(tmp_path: Path) -> None:
    model = transfer(lambda x: layers.Dropout(0.5, name="always")(x, training=True))
    with pytest.raises(CheckpointError, match="layer Dropout as in training 'always'"):
        read(save(model, tmp_path))
    model = transfer(before=lambda x: layers.RandomFlip(name="always")(x, training=True))
    with pytest.raises(CheckpointError, match="layer RandomFlip as in training 'always'"):
        read(save(model, tmp_path))


def test_a_network_with_other_names_takes_the_usual_images(tmp_path: Path) -> None:
    model = resnet(names="my_", epsilon=1e-3)
    weights = assert_read(model, save(model, tmp_path))
    assert (weights.assumed_as, weights.recipe.bn_epsilon) == ("torchvision-v1", 1e-3)
    with pytest.raises(CheckpointError, match=r"not a complete ResNet as Keras .*'my_conv1_bn/b"):
        read(save(model, tmp_path, "weights.h5"))


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_model_without_a_classifier_is_read_without_one(ending: str, tmp_path: Path) -> None:
    weights = read(save(resnet(has_top=False), tmp_path, ending))
    assert not weights.has_classifier
    assert len(weights.tensors) == 5 * 17
    image = keras.Input((SIZE, SIZE, 3))
    x = layers.GlobalMaxPooling2D(name="largest")(resnet(has_top=False)(image))
    file = save(keras.Model(image, x), tmp_path, ending)
    with pytest.raises(CheckpointError, match="layer GlobalMaxPooling2D 'largest'"):
        read(file)


@pytest.mark.parametrize("kind", ["ReLU", "Identity"])
def test_layers_in_a_circle_refuse_a_file(kind: str, plain: Any, tmp_path: Path) -> None:
    def add_circle(config: dict[str, Any]) -> None:
        as_in_keras_2(config)
        for name, other in (("one", "two"), ("two", "one")):
            nodes = [[[other, 0, 0, {}]]]
            fields = {"name": name}
            layer = {"class_name": kind, "name": name, "config": fields, "inbound_nodes": nodes}
            list_layers(config).append(layer)
        if kind == "Identity":
            config["config"]["output_layers"] = [["one", 0, 0]]

    file = save(plain, tmp_path, "h5")
    edit_description(file, add_circle)
    with pytest.raises(CheckpointError, match="its layer 'one' does not depend on images"):
        read(file)


def test_arrays_that_no_layer_has_refuse_a_file(plain: Any, tmp_path: Path) -> None:
    file = save(plain, tmp_path, "h5")
    with h5py.File(file, "r+") as opened_file:
        opened_file["model_weights/other/other/kernel"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=r"would ignore: other/other/kernel; .*--ignore"):
        read(file)
    assert read(file, choice=WeightsChoice(ignore=("other/*",))).ignored == ("other/other/kernel",)


def test_an_optimizer_and_states_of_chance_have_no_effect(tmp_path: Path) -> None:
    model = resnet({"before the classifier": layers.Dropout(0.5, seed=3)})
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    for ending in ("keras", "h5"):
        weights = assert_read(model, save(model, tmp_path, ending))
        assert weights.parts[0].reason == "the optimizer"


def test_a_network_of_users_is_read_by_its_connections(tmp_path: Path) -> None:
    """Basic blocks, no biases, the padding of TensorFlow, and operators in place of layers."""

    def unit(x: Any, outputs: int, size: int, stride: int) -> Any:
        x = layers.Conv2D(outputs, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    image = x = keras.Input((SIZE, SIZE, 3), dtype="uint8")
    x = layers.ReLU()(unit(keras.ops.cast(x, "float32") / 127.5 - 1, 8, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for i, width in enumerate((8, 12, 16, 20)):
        stride = 2 if i else 1
        y = keras.ops.relu(unit(x, width, 3, stride))
        y = unit(y, width, 3, 1)
        x = keras.ops.relu(y + (unit(x, width, 1, stride) if i else x))
    x = layers.Dense(CLASSES, use_bias=False)(layers.GlobalAveragePooling2D()(x))
    model = draw_weights(keras.Model(image, layers.Activation("softmax")(x)))
    for ending in ("keras", "h5"):
        weights = assert_read(model, save(model, tmp_path, ending))
    recipe = weights.recipe
    assert (recipe.spec.block, recipe.padding, recipe.bn_epsilon) == ("basic", "same", 1e-3)
    assert (recipe.mean, recipe.std) == ((127.5,) * 3, (127.5,) * 3)


def test_layers_of_16_bits_are_remarked(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = resnet()
    finally:
        keras.config.set_dtype_policy("float32")
    weights = read(save(model, tmp_path))
    assert "its layers compute in 16 bits; here they compute in float32" in weights.remarks
    assert is_same_answer(compute(model, prepare(weights)), compute_as_read(weights), bound=0.02)
