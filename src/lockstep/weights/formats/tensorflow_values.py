"""The values of a TensorFlow graph: the nodes that make them, and the constants among them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lockstep.weights.formats.tensorflow_graph import FlatGraph, Node

SAME = (
    "Identity",
    "Cast",
    "EnsureShape",
    "StopGradient",
    "PreventGradient",
    "Snapshot",
    "CheckNumerics",
    "ReadVariableOp",
)
"""Operators that change no value in inference."""
RESHAPES = ("Reshape", "Squeeze", "ExpandDims")
CONSTANTS = ("Const", "VarHandleOp", "Variable", "VariableV2")


class Values:
    """The values of a graph, whose nodes may be replaced (`replace_node`)."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self._makers = {node.output: node for node in graph.nodes}

    def replace_node(self, node: Node) -> None:
        """Let a node make its output in place of the one that the graph has."""
        self._makers[node.output] = node

    def source(self, value: str) -> str:
        """Return the value that a value is, behind functions and nodes that change nothing."""
        for _ in range(100):
            value = self.graph.actual(value)
            maker = self._makers.get(value)
            if maker is None or maker.op not in SAME or not maker.inputs:
                return value
            value = maker.inputs[0]
        raise ValueError(f"{value!r:.80} is behind 100 nodes that change nothing")

    def find_maker(self, value: str) -> Node | None:
        """Return the node that computes a value, behind those that change nothing."""
        return self._makers.get(self.source(value))

    def find_constant(self, value: str) -> Node | None:
        """Return the node of the constant that a value is, also a reshaped one; None otherwise."""
        node = self.find_maker(value)
        for _ in range(8):
            if node is None or node.op not in RESHAPES or not node.inputs:
                break
            node = self.find_maker(node.inputs[0])
        return node if node is not None and node.op in CONSTANTS else None

    def list_computed(self, node: Node | None) -> list[str]:
        """Return the inputs of a node that are not constants."""
        inputs = node.inputs if node is not None else ()
        return [value for value in inputs if self.find_constant(value) is None]

    def evaluate(self, value: str, depth: int = 0) -> np.ndarray | None:
        """Return a constant, also a reshaped one; None if it is computed otherwise."""
        node = self.find_maker(value)
        if node is None or depth > 8:
            return None
        if node.op in CONSTANTS:
            return self.graph.array(node)
        if node.op not in RESHAPES or not node.inputs:
            return None
        values = self.evaluate(node.inputs[0], depth + 1)
        if values is None:
            return None
        if node.op == "Squeeze":
            return values.squeeze(tuple(get_list(node, "squeeze_dims")) or None)
        if len(node.inputs) != 2:
            return None
        shape = self.read_integers(node.inputs[1], 8)
        if node.op == "Reshape":
            return values.reshape(shape)
        return np.expand_dims(values, tuple(shape))

    def read_integers(self, value: str, count: int) -> list[int]:
        """Return a constant of a few integers; empty if it is something else."""
        node = self.find_maker(value)
        if node is None or node.op not in CONSTANTS:
            return []
        if np.prod(self.graph.shape(node), dtype=np.float64) > count:
            return []
        values = self.graph.array(node)
        return values.ravel().tolist() if values.dtype.kind == "i" else []

    def read_kernel_shape(self, conv: Node) -> tuple[int, ...]:
        """Return the shape of a convolution's kernel, HWIO."""
        node = self.find_maker(conv.inputs[1])
        if node is None or node.op not in CONSTANTS or len(self.graph.shape(node)) != 4:
            raise ValueError(f"the kernel of {conv.name!r:.80} is not a constant of four axes")
        return self.graph.shape(node)

    def list_nodes_behind(self, values: Iterable[str]) -> list[Node]:
        """Return the nodes that values are computed by, in the order of the graph."""
        names: set[str] = set()
        waiting = list(values)
        while waiting:
            value = self.graph.actual(waiting.pop())
            node = self._makers.get(value) or self._makers.get(f"{value.rpartition(':')[0]}:0")
            if node is not None and node.name not in names:
                names.add(node.name)
                waiting += node.inputs
        return [node for node in self.graph.nodes if node.name in names]


def get_text(node: Node, name: str, default: str) -> str:
    """Return an attribute that is a text."""
    if name not in node.attributes:
        return default
    return bytes(node.attributes[name].s).decode(errors="replace")


def get_flag(node: Node, name: str, default: bool) -> bool:
    """Return an attribute that is true or false."""
    return bool(node.attributes[name].b) if name in node.attributes else default


def get_list(node: Node, name: str) -> list[Any]:
    """Return an attribute that is a list of integers; empty if it is missing."""
    return list(node.attributes[name].list.i) if name in node.attributes else []
