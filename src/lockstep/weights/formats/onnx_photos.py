"""The resize and crop of evaluation as nodes of an ONNX model, in front of a model that takes
squares."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from lockstep.backends.shared.operators import Operand
from lockstep.backends.shared.resize import Operations, crop_centre, read_geometry
from lockstep.recipes import Recipe
from lockstep.weights.formats import onnx_metadata
from lockstep.weights.formats.protobuf import map_entries

_OPERATORS = {"add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div"}


def take_photos(model: Any, recipe: Recipe) -> Any:
    """Return a copy of a model of squares, uint8 [N, S, S, 3], that takes photos of any size, uint8
    [N, H, W, 3]."""
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    onnx_metadata.rename_input(result.graph.node, onnx_metadata.IMAGES, onnx_metadata.SQUARES)
    nodes = _Nodes()
    pixels = crop_centre(
        _Number(nodes, onnx_metadata.IMAGES, np.uint8), read_geometry(recipe), _Operations(nodes)
    )
    pixels = nodes.add(
        "Cast", [nodes.add("Transpose", [pixels], np.float32, perm=[0, 2, 3, 1])], np.uint8
    )
    nodes.made[-1].output[0] = onnx_metadata.SQUARES
    core = list(result.graph.node)
    del result.graph.node[:]
    result.graph.node.extend([*nodes.made, *core])
    result.graph.initializer.extend(nodes.constants)
    height, width = result.graph.input[0].type.tensor_type.shape.dim[1:3]
    height.dim_param = "H"
    width.dim_param = "W"
    return result


def check_resize(model: Any, recipe: Recipe) -> None:
    """Raise `ValueError` unless the nodes that resize and crop are those of `take_photos`. A model
    of squares has none, and gives its images to Cast."""
    import onnx

    alone = onnx.ModelProto(graph=onnx.GraphProto(input=model.graph.input))
    external = [tensor.name for tensor in model.graph.initializer if tensor.external_data]
    expected = _split_resize(take_photos(alone, recipe).graph, external)
    parts = _split_resize(model.graph, external)
    is_bare = not parts[0] and model.graph.input[0].name != onnx_metadata.IMAGES
    if parts not in (expected, ([], ["Cast"])) and not is_bare:
        raise ValueError("its images pass through nodes other than those in its metadata")


def remove_resize(model: Any) -> None:
    """Change a model of photos that `lockstep export` wrote into one of squares; any other model
    stays as it is, also one whose nodes have the same names."""
    text = map_entries(model.metadata_props).get(onnx_metadata.KEY)
    if text is None:
        return
    try:
        check_resize(model, onnx_metadata.apply_preprocessing(Recipe(), text, normalises=False))
    except (ValueError, LookupError):
        return
    onnx_metadata.take_squares(model)


def _split_resize(graph: Any, external: Collection[str]) -> tuple[list[bytes], list[str]]:
    """Return the nodes and constants that resize and crop, without constants in other files, and
    the operators of other nodes that take the input."""
    parts = []
    takers = []
    for value in (*graph.node, *graph.initializer):
        if str(value.name).startswith(onnx_metadata.PREPROCESSING):
            if value.name not in external:
                parts.append(value.SerializeToString())
        elif graph.input[0].name in getattr(value, "input", ()):
            takers.append(value.op_type)
    return sorted(parts), takers


class _Nodes:
    """Nodes and constants in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.constants: list[Any] = []

    def add(
        self, operator: str, operands: Sequence[Any], kind: Any, **attributes: Any
    ) -> "_Number":
        """Add a node; return its output, which has a NumPy type. An operand from outside the graph
        becomes a constant of integers."""
        import onnx

        name = f"{onnx_metadata.PREPROCESSING}{len(self.made)}"
        if operator == "Cast":
            attributes["to"] = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        names = []
        for operand in operands:
            value = operand if isinstance(operand, _Number) else self.constant(operand, np.int64)
            names.append(value.name)
        self.made.append(onnx.helper.make_node(operator, names, [name], name, **attributes))
        return _Number(self, name, kind)

    def constant(self, value: Any, kind: Any) -> "_Number":
        """Add a constant."""
        import onnx

        name = f"{onnx_metadata.PREPROCESSING}constant {len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.array(value, kind), name))
        return _Number(self, name, kind)


class _Number(Operand):
    """A value of the graph."""

    def __init__(self, nodes: _Nodes, name: str, kind: Any) -> None:
        self.nodes = nodes
        self.name = name
        self.kind = kind
        """Its NumPy type."""

    def combine(self, operation: str, other: Any) -> "_Number":
        """Return the result of an operation."""
        operand = other if isinstance(other, _Number) else self.nodes.constant(other, self.kind)
        return self.nodes.add(_OPERATORS[operation], [self, operand], self.kind)


class _Operations(Operations):
    """`lockstep.backends.shared.resize.Operations` of ONNX."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes

    def length(self, images: _Number, axis: int) -> _Number:
        shape = self._nodes.add("Shape", [images], np.int64)
        return self._nodes.add("Gather", [shape, axis], np.int64)

    def integer(self, length: _Number) -> _Number:
        return length

    def count(self, first: _Number | int, end: _Number | int) -> _Number:
        return self.real(self._nodes.add("Range", [first, end, 1], np.int64))

    def cast(self, value: _Number, dtype: str) -> _Number:
        return self._nodes.add("Cast", [value], getattr(np, dtype))

    def floor(self, value: _Number) -> _Number:
        return self._nodes.add("Floor", [value], value.kind)

    def minimum(self, a: _Number, b: _Number) -> _Number:
        return self._nodes.add("Min", [a, b], a.kind)

    def maximum(self, a: _Number, b: _Number) -> _Number:
        return self._nodes.add("Max", [a, b], a.kind)

    def clip(self, value: _Number, low: float, high: float) -> _Number:
        bounds = [self._nodes.constant(bound, value.kind) for bound in (low, high)]
        return self._nodes.add("Clip", [value, *bounds], value.kind)

    def total(self, value: _Number, axis: int) -> _Number:
        return self._nodes.add("ReduceSum", [value, [axis]], value.kind, keepdims=1)

    def take(self, pixels: _Number, index: _Number, axis: int) -> _Number:
        return self._nodes.add("Gather", [pixels, index], pixels.kind, axis=axis)

    def reshape(self, value: _Number, shape: tuple[int, ...]) -> _Number:
        return self._nodes.add("Reshape", [value, shape], value.kind)

    def transpose(self, value: _Number, axes: tuple[int, ...]) -> _Number:
        return self._nodes.add("Transpose", [value], value.kind, perm=list(axes))

    def product(self, a: _Number, b: _Number) -> _Number:
        return self._nodes.add("MatMul", [a, b], a.kind)
