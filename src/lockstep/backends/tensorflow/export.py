"""SavedModel and frozen graph: the recipe's preprocessing, the model and softmax in one graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from lockstep.backends.shared.resize import Operations, crop_centre, read_geometry
from lockstep.backends.tensorflow.model import Model, Tensor, graph
from lockstep.recipes import Recipe
from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular
from lockstep.system.strict_json import to_json


def export(
    recipe: Recipe,
    tensors: dict[str, np.ndarray],
    classes: tuple[str, ...],
    folder: Path,
    preprocessing: str,
) -> None:
    """Write a SavedModel.

    Its `serving_default` takes `images`, uint8 RGB [N, H, W, 3], and returns `classes`, int64 [N],
    and `probabilities`, float32 [N, logits]. Images are resized and cropped as in evaluation
    (`lockstep.backends.shared.resize`). The folder `assets.extra` has the names of the classes in
    `classes.txt`, one on each line, and `preprocessing`, JSON for programs that read the weights.
    Raises `CheckpointError` if the tensors do not fit.
    """
    module, serve = _build_serving(recipe, tensors)
    tf.saved_model.save(module, str(folder), {"serving_default": serve})
    # The folder of a SavedModel for files that TensorFlow does not read.
    extra = folder / "assets.extra"
    extra.mkdir()
    (extra / "lockstep_preprocessing.json").write_text(preprocessing, encoding="utf-8")
    if classes:
        write_lines(extra / "classes.txt", classes)


def export_frozen_graph(
    recipe: Recipe,
    tensors: dict[str, np.ndarray],
    classes: tuple[str, ...],
    folder: Path,
    preprocessing: str,
) -> None:
    """Write `frozen_graph.pb`, a GraphDef with constants, and `classes.txt`. Values and errors are
    those of `export`."""
    _, serve = _build_serving(recipe, tensors)
    write_frozen_graph(serve.get_concrete_function(), preprocessing, classes, folder)


def open_program(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the program in a folder, loaded by TensorFlow's own loader: from uint8 images to
    classes and probabilities."""
    if (folder / _FROZEN_GRAPH).is_file():
        return _load_frozen_graph(folder)
    loaded = tf.saved_model.load(str(folder))  # its signatures live as long as it

    def answer(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answers = loaded.signatures["serving_default"](images=tf.constant(images))
        return answers["classes"].numpy(), answers["probabilities"].numpy()

    return answer


def _build_serving(recipe: Recipe, tensors: dict[str, np.ndarray]) -> tuple[tf.Module, Any]:
    """Return the module and its function of images. Raises `CheckpointError`."""
    module = PhotoProgram(recipe, tensors)
    images = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
    return module, graph(module.serve, input_signature=[images])


class PhotoProgram(tf.Module):  # type: ignore[misc]
    """Photos to classes and probabilities. Raises `CheckpointError` if the tensors do not fit."""

    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> None:
        super().__init__()
        self._geometry = read_geometry(recipe)
        self._model = Model(recipe, tensors)
        self._mean = tf.constant(recipe.mean)
        self._std = tf.constant(recipe.std)

    def serve(self, images: Tensor) -> dict[str, Tensor]:
        """Return classes and probabilities of images of one size."""
        logits = self._model((self.crop(images) - self._mean) / self._std)
        return {"classes": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}

    def crop(self, images: Tensor) -> Tensor:
        """Return what the model sees of photos, before it is normalised: float32 [N, S, S, 3]."""
        side = self._geometry.eval_crop
        squares = tf.transpose(crop_centre(images, self._geometry, _Operations()), (0, 2, 3, 1))
        return tf.ensure_shape(squares, [None, side, side, 3])


class SquareProgram(PhotoProgram):
    """The same for squares: uint8 RGB [N, S, S, 3]."""

    def crop(self, images: Tensor) -> Tensor:
        """Return the squares in float32."""
        return tf.cast(images, tf.float32)


class _Operations(Operations):
    """`lockstep.backends.shared.resize.Operations` of TensorFlow."""

    module = tf

    def length(self, images: Tensor, axis: int) -> Tensor:
        return tf.shape(images, tf.int64)[axis]

    def integer(self, length: Tensor) -> Tensor:
        return length

    def count(self, first: Tensor, end: Tensor) -> Tensor:
        return tf.cast(tf.range(first, end, dtype=tf.int64), tf.float64)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return tf.cast(value, dtype)

    def clip(self, value: Tensor, low: float, high: float) -> Tensor:
        return tf.clip_by_value(value, low, high)

    def total(self, value: Tensor, axis: int) -> Tensor:
        return tf.reduce_sum(value, axis=axis, keepdims=True)

    def take(self, pixels: Tensor, index: Tensor, axis: int) -> Tensor:
        return tf.gather(pixels, index, axis=axis)


_FROZEN_GRAPH = "frozen_graph.pb"
_OUTPUTS = ("classes", "probabilities")


def write_frozen_graph(
    served: Any, preprocessing: str, classes: tuple[str, ...], folder: Path
) -> None:
    """Write `frozen_graph.pb` and `classes.txt` into a new folder.

    `served` is the concrete function of one argument `images` and a dictionary with `_OUTPUTS`.
    Control flow is lowered to Switch and Merge, which TensorFlow 1 has, too.
    """
    frozen = convert_variables_to_constants_v2(served)
    graph = frozen.graph.as_graph_def()
    labels = {output.op.name: name for name, output in zip(_OUTPUTS, frozen.outputs, strict=True)}
    for node in graph.node:
        node.name = labels.get(node.name, node.name)
    for name, text in {
        "lockstep_preprocessing": preprocessing,
        "lockstep_classes": to_json(classes),
    }.items():
        node = graph.node.add(name=name, op="Const")
        node.attr["dtype"].type = tf.string.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(text))
    folder.mkdir()
    (folder / _FROZEN_GRAPH).write_bytes(graph.SerializeToString(deterministic=True))
    write_lines(folder / "classes.txt", classes)


def _load_frozen_graph(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the program in a folder, imported by TensorFlow, as a function of uint8 images to
    classes and probabilities."""
    graph = tf.compat.v1.GraphDef.FromString(read_regular(folder / _FROZEN_GRAPH, WEIGHTS))
    whole = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph, name=""), [])
    program = whole.prune("images:0", [f"{name}:0" for name in _OUTPUTS])

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        classes, probabilities = program(tf.constant(images))
        return classes.numpy(), probabilities.numpy()

    return run
