"""Frozen graphs and SavedModels that TensorFlow writes, Lockstep's own among them. NVIDIA's are in
test_peers.

What TensorFlow computes with a graph is the oracle.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep import backends
from lockstep.backends.tensorflow import export
from lockstep.inference.images import read_square
from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, open_weights
from lockstep.weights.formats import tensorflow_graph, tensorflow_weights
from lockstep.weights.formats.nvidia_tensorflow import name_tensors
from lockstep.weights.preprocessing import FIELDS
from tests.edges import is_same_answer
from tests.inference.cases import CLASSES, random_tensors
from tests.weights.formats.cases import BASIC, RESNEXT, assert_canonical
from tests.weights.formats.onnx_cases import describe

V1 = replace(RESNEXT, layers=(1, 1, 1, 1), stride_in="1x1")
MEAN = (100.0, 110.0, 120.0)
STD = (50.0, 60.0, 70.0)
WRITERS = {"saved": export.export, "frozen": export.export_frozen_graph}
IMAGES = np.random.default_rng(3).integers(0, 256, (2, 40, 40, 3), np.uint8)


def recipe_of(model: str | ModelSpec = RESNEXT, **changes: Any) -> Recipe:
    own = {
        **{"mean": MEAN, "std": STD, "eval_resize": 48, "eval_crop": 40},
        "eval_sampling": "half_pixel",
    }
    return Recipe(model=model, logits=10, precision="fp32").replace(**own | changes)


def read(path: Path) -> Weights:
    place = tensorflow_weights.find(path)
    assert place is not None
    return tensorflow_weights.read(place)


def edit_graph(path: Path, change: Callable[[Any], object]) -> Path:
    """Change the GraphDef of a frozen graph."""
    graph = tf.compat.v1.GraphDef.FromString((path / "frozen_graph.pb").read_bytes())
    change(graph)
    (path / "frozen_graph.pb").write_bytes(graph.SerializeToString())
    return path


def nodes_of(graph: Any, op: str) -> list[Any]:
    return [node for node in graph.node if node.op == op]


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("frozen", {}),
        ("frozen", {"model": BASIC, "padding": "same", "bn_epsilon": 1e-3}),
        ("frozen", {"model": V1, "eval_sampling": "asymmetric", "padding": "flax"}),
        ("frozen", {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ("saved", {"precision": "bf16"}),
    ],
    ids=str,
)
def test_exports_are_read_back_exactly(form: str, changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(**changes)
    tensors = random_tensors(recipe, 1)
    WRITERS[form](recipe, tensors, CLASSES, tmp_path / "model", describe(recipe))
    opened = open_weights(tmp_path / "model")
    assert_canonical(opened.tensors, tensors)
    assert (opened.origin, opened.classes, opened.remarks) == ("TensorFlow", CLASSES, ())
    for name in (*FIELDS, "model", "logits", "padding", "bn_epsilon"):
        assert getattr(opened.recipe, name) == getattr(recipe, name)
    assert {name for array in opened.stored for name in array.tensors} == tensors.keys()
    if form == "saved":
        (tmp_path / "model" / "variables" / "variables.index").unlink()
        with pytest.raises(CheckpointError, match="the graph is not frozen"):
            read(tmp_path / "model")
    # No path inside the folder, and no name, is needed to recognise it.
    file = (tmp_path / "model" / opened.source.name).rename(tmp_path / "model" / "any")
    assert tensorflow_weights.matches(b"", file)
    assert not tensorflow_weights.matches(
        b"", tmp_path / "model" / ("classes.txt" if form == "frozen" else "fingerprint.pb")
    )


def test_a_frozen_graph_answers_in_tensorflow_alone(tmp_path: Path) -> None:
    recipe = recipe_of()
    tensors = random_tensors(recipe, 1)
    WRITERS["frozen"](recipe, tensors, CLASSES, tmp_path / "first", describe(recipe))
    written = lockstep.load(tmp_path / "first").export(tmp_path / "frozen", to="frozen-graph")
    assert written["comparison"]["largest_difference"] < 1e-5
    assert (tmp_path / "frozen" / "classes.txt").read_text().splitlines() == list(CLASSES)
    classes, probabilities = run_graph(tmp_path / "frozen", "classes:0", "probabilities:0")
    logits = compute_logits(recipe, tensors)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert probabilities == pytest.approx(
        powers / powers.sum(axis=1, keepdims=True), rel=1e-3, abs=1e-6
    )
    assert classes.tolist() == logits.argmax(axis=1).tolist()


def run_graph(folder: Path, *outputs: str) -> list[np.ndarray]:
    """Return what TensorFlow computes of photos."""
    graph = tf.compat.v1.GraphDef.FromString((folder / "frozen_graph.pb").read_bytes())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        return list(session.run(outputs, {"images:0": IMAGES}))


def compute_logits(recipe: Recipe, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return the reference's logits of photos."""
    module = backends.load("reference").load_module(recipe, tensors)
    squares = np.empty((len(IMAGES), recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    for image, square in zip(IMAGES, squares, strict=True):
        read_square(image, recipe, square)
    normalised = (squares.astype(np.float64) - recipe.mean) / recipe.std
    return module(normalised.transpose(0, 3, 1, 2))


# Graphs of others


def frozen(function: Callable[[Any], Any], path: Path) -> np.ndarray:
    """Freeze a function of normalised images, and return its logits of images of noise."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    concrete = tf.function(function).get_concrete_function(
        tf.TensorSpec([None, 40, 40, 3], tf.float32, name="x")
    )
    path.write_bytes(
        convert_variables_to_constants_v2(concrete).graph.as_graph_def().SerializeToString()
    )
    return np.asarray(concrete(tf.constant(IMAGES.astype(np.float32) / 128 - 1)))


class Basic:
    """A small ResNet of basic blocks. Each kind of unit is one that a converter writes."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._random = np.random.default_rng(7)

    def _constant(self, *shape: int, low: float = -0.3, scale: float = 1) -> Any:
        return tf.constant(self._random.uniform(low, 1, shape) * scale, tf.float32)

    def _unit(self, x: Any, outputs: int, size: int, stride: int) -> Any:
        kernel = self._constant(
            size, size, x.shape[-1], outputs, scale=(size * size * x.shape[-1]) ** -0.5
        )
        pad = size // 2
        edge = [[0, 0], [size // 2] * 2, [size // 2] * 2, [0, 0]]
        if self._kind == "explicit":
            y = tf.nn.conv2d(x, kernel, stride, edge)
        else:
            y = tf.nn.conv2d(tf.pad(x, edge) if pad else x, kernel, stride, "VALID")
        bias = self._constant(outputs)
        if self._kind == "folded":
            return y + tf.reshape(bias, [1, 1, 1, outputs])
        if self._kind == "biased":
            y = tf.nn.bias_add(y, bias)
        values = [self._constant(outputs, low=0.5) for _ in range(4)]
        if self._kind == "unfused":
            scale, shift, mean, variance = values
            return tf.nn.batch_normalization(y, mean, variance, shift, scale, 2e-5)
        return tf.compat.v1.nn.fused_batch_norm(y, *values, epsilon=2e-5, is_training=False)[0]

    def __call__(self, x: Any) -> Any:
        x = tf.nn.relu(self._unit(x, 8, 7, 2))
        x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
        for stage, width in enumerate((8, 16, 32, 64)):
            stride = 2 if stage else 1
            shortcut = self._unit(x, width, 1, stride) if stage else x
            y = self._unit(tf.nn.relu(self._unit(x, width, 3, stride)), width, 3, 1)
            x = tf.nn.relu(y + shortcut)
        x = tf.reduce_mean(x, [1, 2])
        return tf.matmul(x, self._constant(10, 64), transpose_b=True) + self._constant(10)


@pytest.mark.parametrize("kind", ["folded", "biased", "explicit", "unfused"])
def test_graphs_of_others_compute_as_in_tensorflow(kind: str, tmp_path: Path) -> None:
    expected = frozen(Basic(kind), tmp_path / "graph.pb")
    original = read(tmp_path / "graph.pb")
    module = backends.load("reference").load_module(original.recipe, original.state.tensors)
    logits = module((IMAGES.astype(np.float64) / 128 - 1).transpose(0, 3, 1, 2))
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert bool(original.folded_norms) == (kind == "folded")
    assert original.stated == {"eval_crop"}
    assert original.recipe.bn_epsilon == (1e-5 if kind == "folded" else 2e-5)


def wrong_constant(shape: list[int], **values: Any) -> Callable[[Any], object]:
    """Give the first kernel another shape or other numbers."""

    def change(graph: Any) -> None:
        tensor = first_kernel(graph).attr["value"].tensor
        dtype = tensor.dtype
        tensor.Clear()
        tensor.MergeFrom(type(tensor)(dtype=dtype, **values))
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)

    return change


def first_kernel(graph: Any) -> Any:
    return next(
        node
        for node in nodes_of(graph, "Const")
        if len(node.attr["value"].tensor.tensor_shape.dim) == 4
    )


def variable(graph: Any) -> None:
    first_kernel(graph).op = "VarHandleOp"


def rename_op(op: str, name: str) -> Callable[[Any], object]:
    def change(graph: Any) -> None:
        nodes_of(graph, op)[1].op = name

    return change


def training(graph: Any) -> None:
    nodes_of(graph, "FusedBatchNormV3")[0].attr["is_training"].b = True


def without_notes(graph: Any) -> None:
    for node in nodes_of(graph, "Const"):
        if node.name.startswith("lockstep"):
            graph.node.remove(node)
            return


def circle(graph: Any) -> None:
    [node] = [node for node in graph.node if node.name == "Relu"]
    node.op = "Identity"
    node.input[0] = "Relu"


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a shape without bytes": (
        wrong_constant([2**31, 2**31, 3, 8], float_val=[1.0]),
        "repeat more than 67108864 numbers",
    ),
    "too few bytes": (
        wrong_constant([7, 7, 3, 8], tensor_content=b"\0" * 12),
        r"has 12 bytes, which do not fit",
    ),
    "too many numbers": (
        wrong_constant([1, 1, 3, 1], float_val=[1.0] * 9),
        r"has 9 numbers for the shape \[1, 1, 3, 1\]",
    ),
    "a negative shape": (wrong_constant([7, 7, 3, -8]), r"has the shape \[7, 7, 3, -8\]"),
    "another activation": (rename_op("Relu", "Relu6"), "is used by TensorFlow's Relu6"),
    "an operator with a name of ONNX": (rename_op("Relu", "Gemm"), "is used by TensorFlow's Gemm"),
    "a batch norm in training": (training, "is used by TensorFlow's FusedBatchNormV3"),
    "a variable": (variable, "is a variable, so the graph is not frozen"),
    "a resize of another program": (
        without_notes,
        "'images:0' is used by Gather 'GatherV2:0' and .*; a ResNet has a convolution",
    ),
    "a circle": (circle, "its nodes form a cycle"),
    "nothing": (
        lambda graph: graph.ClearField("node") or graph.node.add(name="a", op="Const"),
        "it has no input of numbers",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    recipe = recipe_of()
    folder = tmp_path_factory.mktemp("whole") / "model"
    WRITERS["frozen"](recipe, random_tensors(recipe, 1), CLASSES, folder, describe(recipe))
    return (folder / "frozen_graph.pb").read_bytes()


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    change: Callable[[Any], object], reason: str, whole: bytes, tmp_path: Path
) -> None:
    (tmp_path / "frozen_graph.pb").write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"frozen_graph.pb .*({reason})"):
        read(edit_graph(tmp_path, change))


def test_a_constant_that_stores_its_last_number_once_is_read(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "frozen_graph.pb").write_bytes(whole)
    original = read(edit_graph(tmp_path, wrong_constant([7, 7, 3, 8], float_val=[1.0, 2.0])))
    kernel = original.state.tensors["conv1.weight"].transpose(2, 3, 1, 0).ravel()
    assert (kernel[0], set(kernel[1:].tolist())) == (1, {2})


def add_constant(graph: Any, name: str, values: Any) -> None:
    node = graph.node.add(name=name, op="Const")
    array = np.asarray(values)
    node.attr["dtype"].type = tf.as_dtype(array.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array))


def choose_classes(graph: Any) -> None:
    """Gather seven of the logits, in another order, before softmax and ArgMax."""
    add_constant(graph, "places", np.array([7, 2, 0, 9, 1, 3, 8], np.int32))
    add_constant(graph, "axis", np.int32(1))
    for node in [*nodes_of(graph, "Softmax"), *nodes_of(graph, "ArgMax")]:
        node.input[0] = "chosen"
    node = graph.node.add(name="chosen", op="GatherV2", input=["BiasAdd", "places", "axis"])
    node.attr["Tparams"].type = tf.float32.as_datatype_enum
    for name in ("Tindices", "Taxis"):
        node.attr[name].type = tf.int32.as_datatype_enum


def test_names_of_classes_are_permuted_like_their_logits(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "frozen_graph.pb").write_bytes(whole)
    original = read(edit_graph(tmp_path, choose_classes))
    assert original.classes == tuple(CLASSES[place] for place in (7, 2, 0, 9, 1, 3, 8))
    assert [part.name for part in original.parts if part.reason == "into the classifier"] == [
        "Gather 'chosen:0'"
    ]
    [expected] = run_graph(tmp_path, "probabilities:0")
    assert is_same_answer(expected, compute_logits(original.recipe, original.tensors))


def name_like_nvidia(graph: Any, original: Weights) -> None:
    """Give constants NVIDIA's names, and leave out what Lockstep notes."""
    theirs = name_tensors(original.recipe.spec)
    names = {array.name: array.tensors for array in original.stored}
    for node in graph.node:
        for place, value in enumerate(node.input):
            if names.get(value):
                node.input[place] = f"scope/{theirs[names[value][0]]}"
        if names.get(node.name):
            node.name = f"scope/{theirs[names[node.name][0]]}"
    for _ in range(2):
        without_notes(graph)


@pytest.mark.parametrize("folds", [False, True])
def test_a_graph_with_nvidias_names_has_its_preprocessing(folds: bool, tmp_path: Path) -> None:
    recipe = recipe_of(padding="same")
    program = export.SquareProgram(recipe, random_tensors(recipe, 1))
    images = tf.TensorSpec([None, 40, 40, 3], tf.uint8, name="images")
    served = tf.function(program.serve, autograph=False).get_concrete_function(images)
    export.write_frozen_graph(served, describe(recipe), (), tmp_path / "a")
    if folds:
        edit_graph(tmp_path / "a", choose_classes)
    ours = read(tmp_path / "a")
    theirs = read(edit_graph(tmp_path / "a", lambda graph: name_like_nvidia(graph, ours)))
    assert (theirs.origin, theirs.stated) == ("NVIDIA TensorFlow", {"mean", "std", "eval_crop"})
    assert (theirs.recipe.mean, theirs.recipe.eval_crop) == (MEAN, 40)
    assert_canonical(theirs.tensors, ours.tensors)


def test_functions_that_call_each_other_without_end_are_refused(tmp_path: Path) -> None:
    message = tensorflow_graph.message
    call = message("Node")(name="n", op="PartitionedCall", input=["x"])
    call.attr.add(key="f").value.func.name = "twice"
    function = message("Definition")(node_def=[call, call])
    function.signature.name = "twice"
    function.signature.input_arg.add(name="x")
    graph = message("Graph")(node=[message("Node")(name="x", op="Placeholder"), call])
    graph.library.function.append(function)
    (tmp_path / "a.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(CheckpointError, match="its functions call each other 32 deep"):
        read(tmp_path / "a.pb")
