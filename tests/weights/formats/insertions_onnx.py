"""Nodes to insert into an ONNX model at the places of `tests.edges`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from tests.edges import PLACES, Place

_VALUES: dict[Place, str] = {
    "before the stem": "input",
    "between blocks": "layer2.0",
    "before the classifier": "features",
    "after it": "logits",
}
"""The value behind which a node is inserted in a bare model of Lockstep."""

Insertion = tuple[Place, str]


def _constant(name: str, values: Any, dtype: type = np.float32) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, dtype), name)


def _shape(place: Place, channels: int, values: np.ndarray) -> np.ndarray:
    is_image = place in ("before the stem", "between blocks")
    return values.reshape(channels, 1, 1) if is_image else values


def _build(place: Place, channels: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return nodes from `x` to `y`, and their constants, by name."""
    make = onnx.helper.make_node
    line = _shape(place, channels, np.linspace(0.5, 1.5, channels))
    shift = _shape(place, channels, np.linspace(-3, 3, channels))
    order = np.roll(np.arange(channels), 1)
    norm = [_constant(f"n{i}", np.linspace(0.5 + i, 1.5 + i, channels)) for i in range(4)]
    names = [value.name for value in norm]
    square = np.eye(channels) + np.linspace(-1, 1, channels**2).reshape(channels, channels)
    simple = (
        *("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Exp", "Log", "Sqrt", "Softplus", "Identity"),
        *("LeakyRelu", "Elu", "Selu", "HardSigmoid", "Softmax", "LogSoftmax", "Hardmax", "Floor"),
        *("Dropout", "Erf", "Gelu", "HardSwish", "Reciprocal", "Round", "Sign", "Softsign"),
    )
    built: dict[str, tuple[list[Any], list[Any]]] = {
        kind: ([make(kind, ["x"], ["y"])], []) for kind in simple
    }
    for kind, number in (("Add", shift), ("Sub", shift), ("Mul", line), ("Div", line)):
        built[f"{kind} of channels"] = [make(kind, ["x", "c"], ["y"])], [_constant("c", number)]
        built[f"{kind} of a number"] = [make(kind, ["x", "c"], ["y"])], [_constant("c", 1.75)]
        built[f"{kind} of itself"] = [make(kind, ["x", "x"], ["y"])], []
        built[f"{kind}, constant first"] = [make(kind, ["c", "x"], ["y"])], [_constant("c", shift)]
    built |= {
        "Mul of Sigmoid": ([make("Sigmoid", ["x"], ["s"]), make("Mul", ["x", "s"], ["y"])], []),
        "Gather": ([make("Gather", ["x", "o"], ["y"], axis=1)], [_constant("o", order, np.int64)]),
        "Gather of some": (
            [make("Gather", ["x", "o"], ["y"], axis=1)],
            [_constant("o", order[: channels // 2], np.int64)],
        ),
        "Gather of images": (
            [make("Gather", ["x", "o"], ["y"], axis=0)],
            [_constant("o", [1, 0], np.int64)],
        ),
        "Slice": (
            [make("Slice", ["x", "b", "e", "a"], ["y"])],
            [_constant(name, [i], np.int64) for name, i in (("b", 1), ("e", 2**40), ("a", 1))],
        ),
        "Slice backwards": (
            [make("Slice", ["x", "b", "e", "a", "s"], ["y"])],
            [
                _constant(name, [i], np.int64)
                for name, i in (("b", -1), ("e", -(2**40)), ("a", 1), ("s", -1))
            ],
        ),
        "BatchNormalization": (
            [make("BatchNormalization", ["x", *names], ["y"], epsilon=1e-3)],
            norm,
        ),
        "InstanceNormalization": (
            [make("InstanceNormalization", ["x", "n0", "n1"], ["y"])],
            norm[:2],
        ),
        "LpNormalization": ([make("LpNormalization", ["x"], ["y"], axis=1)], []),
        "Clip": (
            [make("Clip", ["x", "b", "e"], ["y"])],
            [_constant("b", -0.1), _constant("e", 0.1)],
        ),
        "Cast to integers": (
            [
                make("Cast", ["x"], ["i"], to=onnx.TensorProto.INT32),
                make("Cast", ["i"], ["y"], to=onnx.TensorProto.FLOAT),
            ],
            [],
        ),
        "Cast to doubles": (
            [
                make("Cast", ["x"], ["d"], to=onnx.TensorProto.DOUBLE),
                make("Cast", ["d"], ["y"], to=onnx.TensorProto.FLOAT),
            ],
            [],
        ),
        "Pow": ([make("Pow", ["x", "c"], ["y"])], [_constant("c", 2.0)]),
        "Max": ([make("Max", ["x", "c"], ["y"])], [_constant("c", 0.25)]),
        "Sum": ([make("Sum", ["x", "c"], ["y"])], [_constant("c", shift)]),
        "Where": (
            [make("Greater", ["x", "c"], ["m"]), make("Where", ["m", "x", "c"], ["y"])],
            [_constant("c", 0.25)],
        ),
        "Concat and Slice": ([make("Concat", ["x", "x"], ["y"], axis=1)], []),
    }
    if place in ("before the stem", "between blocks"):
        kernel = square.reshape(channels, channels, 1, 1)
        wide = np.full((channels, 1, 3, 3), 1 / 9)
        built |= {
            "Conv": ([make("Conv", ["x", "k"], ["y"])], [_constant("k", kernel)]),
            "Conv of channels": (
                [make("Conv", ["x", "k"], ["y"], group=channels, pads=[1] * 4)],
                [_constant("k", wide)],
            ),
            "AveragePool": (
                [make("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4)],
                [],
            ),
            "MaxPool": ([make("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4)], []),
            "Transpose": ([make("Transpose", ["x"], ["y"], perm=[0, 1, 3, 2])], []),
            "Pad": (
                [make("Pad", ["x", "p"], ["y"])],
                [_constant("p", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)],
            ),
            "Pad with ones": (
                [make("Pad", ["x", "p", "c"], ["y"])],
                [_constant("p", [0, 0, 1, 1, 0, 0, 1, 1], np.int64), _constant("c", 1.0)],
            ),
            "Resize": (
                [make("Resize", ["x", "", "s"], ["y"])],
                [_constant("s", [1.0, 1.0, 0.5, 0.5])],
            ),
            "Flip of columns": (
                [make("Slice", ["x", "b", "e", "a", "s"], ["y"])],
                [
                    _constant(name, [i], np.int64)
                    for name, i in (("b", -1), ("e", -(2**40)), ("a", 3), ("s", -1))
                ],
            ),
        }
    else:
        weight = _constant("w", square)
        built |= {
            "Gemm": (
                [make("Gemm", ["x", "w", "b"], ["y"])],
                [weight, _constant("b", np.ravel(shift))],
            ),
            "Gemm of alpha": (
                [make("Gemm", ["x", "w", "b"], ["y"], transB=1, alpha=0.5, beta=2.0)],
                [weight, _constant("b", np.ravel(shift))],
            ),
            "MatMul": ([make("MatMul", ["x", "w"], ["y"])], [weight]),
            "Gemm and Relu": (
                [make("Gemm", ["x", "w"], ["g"]), make("Relu", ["g"], ["y"])],
                [weight],
            ),
            "Reshape": (
                [make("Reshape", ["x", "s"], ["y"])],
                [_constant("s", [-1, channels], np.int64)],
            ),
            "Reshape of images": (
                [make("Reshape", ["x", "s"], ["y"])],
                [_constant("s", [-1, 2 * channels], np.int64)],
            ),
            "Transpose": ([make("Transpose", ["x"], ["y"], perm=[1, 0])], []),
            "TopK": ([make("TopK", ["x", "k"], ["y", ""])], [_constant("k", [2], np.int64)]),
            "ArgMax": ([make("ArgMax", ["x"], ["y"], axis=1)], []),
            "Softmax twice": ([make("Softmax", ["x"], ["p"]), make("Softmax", ["p"], ["y"])], []),
            "Softmax of images": ([make("Softmax", ["x"], ["y"], axis=0)], []),
            "Softmax, then Gather": (
                [make("Softmax", ["x"], ["p"]), make("Gather", ["p", "o"], ["y"], axis=1)],
                [_constant("o", order, np.int64)],
            ),
            "Softmax, then some": (
                [make("Softmax", ["x"], ["p"]), make("Gather", ["p", "o"], ["y"], axis=1)],
                [_constant("o", order[:3], np.int64)],
            ),
            "Softmax, then Log": ([make("Softmax", ["x"], ["p"]), make("Log", ["p"], ["y"])], []),
            "one Sigmoid": (
                [make("Gather", ["x", "o"], ["g"], axis=1), make("Sigmoid", ["g"], ["y"])],
                [_constant("o", [3], np.int64)],
            ),
            "one number": (
                [make("Gather", ["x", "o"], ["y"], axis=1)],
                [_constant("o", [3], np.int64)],
            ),
        }
    return built


def list_insertions(channels: dict[Place, int]) -> Iterator[Insertion]:
    """Yield a place and the name of what is inserted there."""
    for place in PLACES:
        for name in _build(place, channels[place]):
            yield place, name


def insert(model: Any, insertion: Insertion, channels: dict[Place, int]) -> Any:
    """Return a copy of a bare model with nodes inserted."""
    place, name = insertion
    edited = onnx.ModelProto.FromString(model.SerializeToString())
    del edited.metadata_props[:]
    graph = edited.graph
    nodes, constants = _build(place, channels[place])[name]
    value = _VALUES[place]
    for node in graph.node:
        for i, used in enumerate(node.input):
            node.input[i] = "y" if used == value else used
    for node in nodes:
        for i, used in enumerate(node.input):
            node.input[i] = value if used == "x" else used
    if place == "after it":
        del graph.output[:]
        graph.output.add(name="y")
    where = next((i for i, node in enumerate(graph.node) if "y" in node.input), len(graph.node))
    for node in reversed(nodes):
        graph.node.insert(where, node)
    graph.initializer.extend(constants)
    return edited
