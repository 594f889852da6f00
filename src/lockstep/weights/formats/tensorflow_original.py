"""A graph as TensorFlow computes it, rebuilt from the nodes that the reader accounted for: `write`.

`lockstep.backends.tensorflow.original` computes it.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.files import write_json
from lockstep.weights.formats.tensorflow_graph import FlatGraph, Node, message
from lockstep.weights.formats.tensorflow_nodes import Nodes

_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
_OPERATORS = {
    *("Add", "AddV2", "ArgMax", "AvgPool", "BiasAdd", "Cast", "ConcatV2", "Const", "Conv2D", "Div"),
    *("EnsureShape", "Exp", "ExpandDims", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    *("GatherV2", "Identity", "Log", "LogSoftmax", "MatMul", "MaxPool", "Maximum", "Mean", "Mul"),
    *("Neg", "Pack", "Pad", "PadV2", "RealDiv", "Relu", "Reshape", "ReverseV2", "Rsqrt", "Shape"),
    *("Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "StopGradient", "StridedSlice"),
    *("Sub", "Transpose"),
}
"""The operators that are rebuilt: none of them reads a file or runs code."""
_FLOAT = 1
_UINT8 = 4
_MOST_BYTES = 2**31 - 2**20
"""What a message of Protocol Buffers may have."""


def write(graph: FlatGraph, nodes: Nodes, output: str, folder: Path) -> None:
    """Write the nodes of a graph that an output is computed from, with their constants, as a
    frozen graph. Raises `ValueError` if a node is not rebuilt, or the graph is too large."""
    (start,) = nodes.operators.inputs
    name_maker = nodes.values.name_maker
    makers = {node.name: node for node in graph.nodes}
    first = name_maker(start)
    names = {first: "images"}
    waiting = [name_maker(output)]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names[name] = f"node{len(names)}"
            waiting += map(name_maker, makers[name].inputs)
    kind = _UINT8 if nodes.operators.takes_bytes else _FLOAT
    rebuilt = [_build_node("images", "Placeholder", [], {"dtype": message("Value")(type=kind)})]
    for name, new in names.items():
        if name != first:
            rebuilt.append(_rebuild(graph, makers[name], new, names))
    data = message("Graph")(node=rebuilt).SerializeToString()
    if len(data) > _MOST_BYTES:
        raise ValueError("it has more than 2 GiB")
    (folder / "graph.pb").write_bytes(data)
    place = _rename(graph.actual(output), names)
    write_json(folder / "graph.json", {"input": "images:0", "output": place})


def _rename(value: str, names: dict[str, str]) -> str:
    """Return a value's name in the rebuilt graph."""
    node, _, place = value.partition(":")
    if not place.isdecimal():
        raise ValueError(f"{value!r:.80} is not rebuilt")
    return f"{names[node]}:{place}"


def _rebuild(graph: FlatGraph, node: Node, name: str, names: dict[str, str]) -> Any:
    """Return a node with another name. Variables become constants."""
    if node.op in _VARIABLES:
        return _build_constant(name, graph.array(node).astype(np.float32))
    inputs = [_rename(graph.actual(value), names) for value in node.inputs]
    if node.op == "ReadVariableOp":
        return _build_node(name, "Identity", inputs, {"T": message("Value")(type=_FLOAT)})
    if node.op not in _OPERATORS:
        raise ValueError(f"{node.op} {node.name!r:.80} is not rebuilt")
    # Private attributes name devices and other nodes.
    attributes = {key: value for key, value in node.attributes.items() if not key.startswith("_")}
    return _build_node(name, node.op, inputs, attributes)


def _build_node(name: str, kind: str, inputs: list[str], attributes: dict[str, Any]) -> Any:
    entries = [message("Attribute")(key=key, value=value) for key, value in attributes.items()]
    return message("Node")(name=name, op=kind, input=inputs, attr=entries)


def _build_constant(name: str, array: np.ndarray) -> Any:
    sizes = [message("Dim")(size=size) for size in array.shape]
    tensor = message("Tensor")(
        dtype=_FLOAT, tensor_shape=message("Shape")(dim=sizes), tensor_content=array.tobytes()
    )
    attributes = {"dtype": message("Value")(type=_FLOAT), "value": message("Value")(tensor=tensor)}
    return _build_node(name, "Const", [], attributes)
