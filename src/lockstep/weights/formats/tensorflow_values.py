"""The values of a TensorFlow graph: the nodes that make them, and the constants among them."""

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from lockstep.weights.formats.tensor_bundle import DTYPES
from lockstep.weights.formats.tensorflow_graph import FLOATS, NUMBERS, VARIABLES, FlatGraph, Node

_GRADIENTS = ("StopGradient", "PreventGradient")
_SAME = ("Identity", "ReadVariableOp", "EnsureShape", "CheckNumerics", "Snapshot", *_GRADIENTS)
"""Operators that change no value in inference."""
_CONSTANTS = ("Const", *VARIABLES)
_LAYOUTS: dict[str, Callable[..., Any]] = {
    "Reshape": lambda node, array, shape: array.reshape(shape),
    "Transpose": lambda node, array, order: array.transpose(order),
    "ExpandDims": lambda node, array, axis: np.expand_dims(array, tuple(axis.ravel())),
    "Squeeze": lambda node, array: array.squeeze(
        tuple(get_attribute(node, "squeeze_dims", [])) or None
    ),
    "Split": lambda node, axis, array: np.split(
        array, max(get_attribute(node, "num_split", 1), 1), int(axis)
    ),
}
"""Operators that lay out the numbers of a constant in another way."""
_TYPES = DTYPES | {4: np.dtype(np.uint8), 14: np.dtype(np.float32)}
"""NumPy's types by TensorFlow's numbers."""
_OTHERS: dict[str, Callable[..., Any]] = {
    "Cast": lambda node, array: (
        array.astype(_TYPES[get_type(node, "DstT")]) if get_type(node, "DstT") in _TYPES else None
    ),
    "Shape": lambda node, array: np.array(array.shape, _TYPES[get_type(node, "out_type") or 3]),
    "Sum": lambda node, array, axes: array.sum(
        tuple(axes.ravel()), keepdims=get_attribute(node, "keep_dims", False)
    ),
    "StridedSlice": lambda node, array, place, *others: (
        array[place[0]] if get_attribute(node, "shrink_axis_mask", 0) == place.size == 1 else None
    ),
    "Range": lambda node, start, end, step: np.arange(start, end, step),
    "GatherV2": lambda node, array, places, axis: array.take(places, int(axis)),
    "BatchMatMulV2": lambda node, array, other: array @ other,
}
"""Operators that resize images, in exports of Lockstep."""
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "RealDiv": np.divide,
    "FloorDiv": np.floor_divide,
    "Floor": np.floor,
    "Minimum": np.minimum,
    "Maximum": np.maximum,
    "Neg": np.negative,
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Rsqrt": lambda array: 1 / np.sqrt(array),
}
"""Operators that compute a constant of others."""
_MOST_INTEGERS = 64
_MOST_NUMBERS = 2**30
"""This many numbers may come from pixels of an image."""
_COMPUTED = {*_LAYOUTS, *_OTHERS, *_ARITHMETIC}


def is_same(node: Node) -> bool:
    """Return whether a node changes no value, apart from rounding."""
    types = (get_type(node, "SrcT"), get_type(node, "DstT"))
    return node.op in _SAME or (node.op == "Cast" and set(types) <= {*FLOATS})


class Values:
    """The values of a graph."""

    def __init__(self, graph: FlatGraph) -> None:
        self.read: set[str | None] = set()
        """The names under which the constants that were read are stored."""
        self._graph = graph
        self._makers = {node.name: node for node in graph.nodes}
        self._constants: dict[str, np.ndarray | None] = {}

    def name_maker(self, value: str) -> str:
        """Return the name of the node that makes a value, behind functions."""
        return self._graph.actual(value).partition(":")[0]

    def source(self, value: str) -> str:
        """Return the value that a value is, behind functions and nodes that change nothing."""
        for _ in range(100):
            value = self._graph.actual(value)
            maker = self._makers.get(self.name_maker(value))
            if maker is None or not is_same(maker) or not maker.inputs:
                return value
            value = maker.inputs[0]
        raise ValueError(f"{value!r:.80} is behind 100 nodes that change nothing")

    def find_maker(self, value: str) -> Node | None:
        """Return the node that computes a value, behind those that change nothing."""
        return self._makers.get(self.name_maker(self.source(value)))

    def find_constant(self, value: str) -> Node | None:
        """Return the node whose constant a value is, or is a layout of; None if it is computed."""
        node = self.find_maker(value)
        while node is not None and node.op in _LAYOUTS and node.inputs:
            node = self.find_maker(node.inputs[int(node.op == "Split")])
        return node if node is not None and node.op in _CONSTANTS else None

    def evaluate(self, value: str) -> np.ndarray | None:
        """Return a constant, also one computed from others; None if it is not numeric, or computed
        from images. Raises `ValueError` if it is stored nowhere, or its bytes do not fit."""
        value = self.source(value)
        if value not in self._constants:
            self._constants[value] = self._compute(value)
        return self._constants[value]

    def _compute(self, value: str) -> np.ndarray | None:
        node = self.find_maker(value)
        if node is None:
            return None
        if node.op in _CONSTANTS:
            self.read.add(self._graph.place(node))
            return self._graph.array(node) if self._graph.dtype(node) in NUMBERS else None
        arrays = list(map(self.evaluate, node.inputs)) if node.op in _COMPUTED else []
        numbers = [array for array in arrays if array is not None]
        if not numbers or len(numbers) < len(arrays):
            return None
        if node.op in _ARITHMETIC:
            size = np.broadcast(*numbers).size
            self._graph.charge(node, size)
            with np.errstate(all="ignore"):
                return _ARITHMETIC[node.op](*numbers)
        self._graph.charge(node, _count_results(node.op, numbers))
        laid_out = (_LAYOUTS | _OTHERS)[node.op](node, *numbers)
        return laid_out[int(value.rpartition(":")[2])] if node.op == "Split" else laid_out

    def compute(self, value: str, image: str, pixels: np.ndarray) -> np.ndarray | None:
        """Return what a value is for pixels of an image; None if it is computed otherwise than by
        operators of constants."""
        self._graph.allow(_MOST_NUMBERS)
        values = Values(self._graph)
        values._constants[image] = pixels
        return values.evaluate(value)

    def read_integers(self, value: str) -> list[int]:
        """Return a constant of a few integers as a list; empty if it is something else."""
        array = self.evaluate(value)
        if array is None or array.dtype.kind != "i" or array.size > _MOST_INTEGERS:
            return []
        return list(map(int, array.ravel()))

    def sort_nodes(self, values: Iterable[str]) -> list[Node]:
        """Return the nodes that values are computed by, every node after those that it needs.
        Raises `ValueError` if they form a circle."""
        needs: dict[str, list[str]] = {}
        waiting = list(map(self.name_maker, values))
        while waiting:
            name = waiting.pop()
            if name not in needs and name in self._makers:
                needs[name] = list(map(self.name_maker, self._makers[name].inputs))
                waiting += needs[name]
        try:
            names = list(TopologicalSorter(needs).static_order())
        except CycleError:
            raise ValueError("its nodes form a cycle") from None
        return [self._makers[name] for name in names if name in self._makers]


def _count_results(op: str, arrays: Sequence[np.ndarray]) -> int:
    """Return at most how many numbers an operator makes of arrays."""
    sizes = [array.size for array in arrays]
    if op == "Range":
        start, end, step = (int(array.clip(-(2**60), 2**60)) for array in arrays)
        return abs((end - start) // (step or 1)) + 1
    if op in ("GatherV2", "BatchMatMulV2"):
        shared = arrays[0].shape[-1 if len(arrays) == 2 else int(arrays[2])]
        return sizes[0] * sizes[1] // max(shared, 1)
    return max(sizes)


def get_type(node: Node, name: str) -> int:
    """Return TensorFlow's number of a type that is an attribute; 0 if it is missing."""
    return int(node.attributes[name].type) if name in node.attributes else 0


def get_attribute(node: Node, name: str, default: Any) -> Any:
    """Return an attribute of the type that its default has: a text, a truth value, an integer, or a
    list of integers."""
    if name not in node.attributes:
        return default
    value = node.attributes[name]
    if isinstance(default, str):
        return bytes(value.s).decode(errors="replace")
    if isinstance(default, bool):
        return bool(value.b)
    return list(value.list.i) if isinstance(default, list) else int(value.i)
