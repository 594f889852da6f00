"""Frozen graphs: a GraphDef whose weights are constants, for programs that take no SavedModel.

Its nodes `images`, `classes` and `probabilities` are the input and the outputs. What `lockstep`
needs to read the graph back is in two constants that nothing uses
(`lockstep.weights.formats.tensorflow_weights`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular
from lockstep.system.strict_json import to_json

FILE = "frozen_graph.pb"
CLASSES = "classes.txt"
INPUT = "images"
OUTPUTS = ("classes", "probabilities")


def write(served: Any, preprocessing: str, classes: tuple[str, ...], folder: Path) -> None:
    """Write `frozen_graph.pb` and `classes.txt` into a new folder.

    `served` is the concrete function of one argument `images` and a dictionary with `OUTPUTS`.
    Control flow is lowered to Switch and Merge, which TensorFlow 1 has, too.
    """
    frozen = convert_variables_to_constants_v2(served)
    graph = frozen.graph.as_graph_def()
    labels = {output.op.name: name for name, output in zip(OUTPUTS, frozen.outputs, strict=True)}
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
    (folder / FILE).write_bytes(graph.SerializeToString(deterministic=True))
    write_lines(folder / CLASSES, classes)


def load(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the program in a folder, imported by TensorFlow, as a function of uint8 images to
    classes and probabilities."""
    graph = tf.compat.v1.GraphDef.FromString(read_regular(folder / FILE, WEIGHTS))
    whole = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph, name=""), [])
    program = whole.prune(f"{INPUT}:0", [f"{name}:0" for name in OUTPUTS])

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        classes, probabilities = program(tf.constant(images))
        return classes.numpy(), probabilities.numpy()

    return run
