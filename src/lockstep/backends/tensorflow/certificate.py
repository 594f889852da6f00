"""For the certificate of a conversion: weights files as TensorFlow and Keras read them, and what
they compute of a network."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends.tensorflow.framework_import import tf
from lockstep.recipes import Recipe

_MODELS = {16: "ResNet50", 33: "ResNet101", 50: "ResNet152"}
"""Models of keras.applications by their number of blocks."""


def read(path: Path, recipe: Recipe) -> dict[str, np.ndarray] | None:
    """Return the variables of a checkpoint, whose `.index` is given, or of a `.h5` for
    `keras.applications`, by name.

    Keras loads a `.h5` into its own model of the recipe, and the values are those of the model's
    variables. The result is None if the installed Keras is older than the file's layout. Raises
    what TensorFlow and Keras raise.
    """
    if path.suffix != ".h5":
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    if path.name.endswith(".weights.h5") and tf.keras.__version__.startswith("2."):
        return None
    build = getattr(tf.keras.applications, _MODELS[sum(recipe.spec.layers)])
    model = build(weights=str(path), classes=recipe.logits, classifier_activation=None)
    # Keras 3 has a path of layer and variable, Keras 2 has both in the name.
    arrays = {}
    for variable in model.weights:
        name = getattr(variable, "path", variable.name)
        arrays[name.removesuffix(":0")] = variable.numpy()
    return arrays


LAYERS = (
    *("Activation", "Add", "AveragePooling2D", "BatchNormalization", "Conv2D", "Dense", "Dropout"),
    *("Flatten", "GlobalAveragePooling2D", "InputLayer", "MaxPooling2D", "Normalization", "ReLU"),
    *("Rescaling", "Reshape", "Softmax", "ZeroPadding2D"),
)
"""The layers of Keras that are rebuilt: built-in ones, which run no code of a file."""


def compute(folder: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the outputs [N, outputs] of images, float32 [N, H, W, 3] or [N, 3, H, W], and the
    program's version.

    The folder holds `graph.pb` and `graph.json`, with the names of the graph's input and output; or
    `layers.json`, a list of layers of Keras with their class, configuration and inputs, and
    `layers.npz`, their variables in the order of Keras; or `application.json`, a model of
    `keras.applications`, with its variables by layer and name.
    """
    if (folder / "graph.pb").exists():
        return _compute_graph(folder, images), f"TensorFlow {tf.__version__}"
    build = _build_application if (folder / "application.json").exists() else _build_model
    model = build(folder, images.shape[1:])
    outputs = [model(image[None], training=False).numpy() for image in images]
    return np.concatenate(outputs), f"Keras {tf.keras.__version__}"


def _compute_graph(folder: Path, images: np.ndarray) -> np.ndarray:
    about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    definition = tf.compat.v1.GraphDef.FromString((folder / "graph.pb").read_bytes())
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        place = graph.get_tensor_by_name(about["input"])
        images = images.astype(place.dtype.as_numpy_dtype)
        with tf.compat.v1.Session(graph=graph) as session:
            outputs = [session.run(about["output"], {place: image[None]}) for image in images]
    return np.concatenate(outputs)


def _build_application(folder: Path, shape: tuple[int, ...]) -> Any:
    """Return a model of `keras.applications` for images of a shape, which returns logits."""
    about = json.loads((folder / "application.json").read_text(encoding="utf-8"))
    arrays = np.load(folder / "layers.npz", allow_pickle=False)
    build = getattr(tf.keras.applications, about["model"])
    model = build(
        weights=None, input_shape=shape, classes=about["classes"], classifier_activation=None
    )
    for layer in model.layers:
        names = [variable.name.rpartition("/")[2].removesuffix(":0") for variable in layer.weights]
        layer.set_weights([arrays[f"{layer.name}/{name}"] for name in names])
    return tf.keras.Model(model.input, model.output)


def _build_model(folder: Path, shape: tuple[int, ...]) -> Any:
    """Return a model of built-in layers for images of a shape. Raises `ValueError` for another
    layer."""
    keras = tf.keras
    layers = json.loads((folder / "layers.json").read_text(encoding="utf-8"))
    arrays = np.load(folder / "layers.npz", allow_pickle=False)
    values: dict[str, Any] = {}
    for row in layers[:-1]:
        if row["class_name"] not in LAYERS:
            raise ValueError(f"a layer {row['class_name']} is not supported")
        if row["class_name"] == "InputLayer":
            values[row["name"]] = keras.Input(shape)
            continue
        inputs = [values[name] for name in row["inputs"]]
        layer = getattr(keras.layers, row["class_name"]).from_config(row["config"])
        values[row["name"]] = layer(inputs if len(inputs) > 1 else inputs[0])
        layer.set_weights([arrays[name] for name in row["variables"]])
    return keras.Model(values[layers[0]["name"]], values[layers[-1]["name"]])
