"""Nodes and constants of an ONNX file. Nothing of it is run, and only files in its folder are read.

A constant can be stored in another file (external data). Its name must lie inside the model's
folder, and the bytes it names must exist. The package onnx parses the file, which is a message of
Protocol Buffers of at most 2 GiB.

Source: onnx.proto and ExternalData.md of ONNX.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular, read_regular
from lockstep.system.strict_json import is_list_of, is_text
from lockstep.weights.formats.network import ROUNDING
from lockstep.weights.formats.onnx_metadata import take_squares
from lockstep.weights.formats.stand_ins import refuse_stand_in

INSTALL = "pip install onnx==1.23.2"
_MOST_BYTES = 2**31 - 1
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""Fields of a ModelProto and their wire types: 0 is a number, 2 is bytes with their length."""
_VERSION = 1
_GRAPH = 7
_MOST_STEPS = 16
"""A constant is followed through at most this many nodes."""


@dataclass(frozen=True)
class Graph:
    """The graph of a model."""

    path: Path
    onnx: Any
    """The package."""
    nodes: tuple[Any, ...]
    inputs: tuple[str, ...]
    """Names of the inputs that are not constants."""
    makers: dict[str, Any]
    """The node that makes each value."""
    users: dict[str, tuple[Any, ...]]
    """The nodes that use each value, in the order of the graph."""
    stored: dict[str, Any]
    """Constants by name, as TensorProto."""
    classes: tuple[str, ...]
    """Names of the classes, if `lockstep export` wrote them."""
    metadata: dict[str, str]
    """The properties of the model that its writer chose."""

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of a node's attribute."""
        found = [each for each in node.attribute if each.name == name]
        return self.onnx.helper.get_attribute_value(found[0]) if found else default

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant, also one behind Identity, Cast, Transpose or `ROUNDING`; None if it is
        computed from images.

        Raises `ValueError` if its bytes do not fit its shape or lie outside of the model's folder.
        """
        place, nodes = self.place(name)
        if place is None:
            return None
        values = _array(self, place)
        for node in reversed(nodes):
            if node.op_type == "Transpose":
                values = values.transpose(self.attribute(node, "perm", None))
            elif values.dtype.kind in "iu":
                values = self._dequantised(values, node)
        return values

    def _dequantised(self, values: np.ndarray, node: Any) -> np.ndarray:
        """Return the float32 values that a node DequantizeLinear makes of constant integers."""
        scale, zero = (self.constant(name) for name in (*node.input[1:], "", "")[:2])
        axis = self.attribute(node, "axis", 1)
        if (
            scale is None
            or scale.dtype != np.float32
            or scale.size not in (1, *values.shape[axis : axis + 1])
        ):
            raise ValueError(
                f"the scale of {node.output[0]!r} is no constant with a float32 for each channel"
            )
        if zero is not None and zero.any():
            raise ValueError(
                f"the integers of {node.output[0]!r} are not symmetric: their zero point is not 0"
            )
        along = [1] * values.ndim
        if scale.size > 1:
            along[axis] = -1
        return np.asarray(values.astype(np.float32) * scale.reshape(along))

    def place(self, name: str) -> tuple[str | None, list[Any]]:
        """Return the stored constant that a value is, None if it is none, and the nodes that
        transpose or dequantise it."""
        nodes: list[Any] = []
        for _ in range(_MOST_STEPS):
            if name in self.stored:
                return name, nodes
            maker = self.makers.get(name)
            if (
                maker is None
                or maker.op_type not in ("Identity", "Cast", "Transpose", *ROUNDING)
                or not maker.input
            ):
                break
            nodes += [maker] if maker.op_type in ("Transpose", "DequantizeLinear") else []
            name = maker.input[0]
        return None, nodes

    def described(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, type and shape of every stored constant."""
        for name, tensor in self.stored.items():
            try:
                kind = np.dtype(self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).name
            except (LookupError, TypeError):
                kind = f"type {tensor.data_type}"
            yield name, kind, tuple(tensor.dims)

    def others(self) -> tuple[Path, ...]:
        """Return the other files of the model's folder in which constants are stored."""
        places = {
            each.value
            for one in self.stored.values()
            for each in one.external_data
            if each.key == "location"
        }
        return tuple(self.path.parent / place for place in sorted(places))

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""
        values = self.constant(name)
        if values is None:
            raise ValueError(f"{what} ({name!r}) is not a constant")
        if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
            raise ValueError(
                f"{what} ({name!r}) is {values.dtype}, expected floats; export the model without"
                " quantization"
            )
        return np.array(values, np.float32, order="C")

    def halves(self) -> list[str]:
        """Return the names of constants of at least two axes that have fewer bits than float32."""
        kinds = (self.onnx.TensorProto.FLOAT16, self.onnx.TensorProto.BFLOAT16)
        return [
            name
            for name, tensor in self.stored.items()
            if tensor.data_type in kinds and len(tensor.dims) > 1
        ]


def is_onnx(path: Path) -> bool:
    """Return whether a file is an ONNX model: a message that has the fields of one, a version and a
    graph among them."""
    try:
        size = path.stat().st_size
        found = set()
        with open_regular(path, WEIGHTS) as file:
            while file.tell() < size:
                field, kind = divmod(read_number(file.read), 8)
                if _MODEL_FIELDS.get(field) != kind:
                    return False
                found.add(field)
                length = read_number(file.read)
                if kind == 2:
                    file.seek(length, 1)
                if file.tell() > size:
                    return False
    except (OSError, ValueError):
        return False
    return {_VERSION, _GRAPH} <= found


def read_number(read: Any) -> int:
    """Return the next number in the encoding of Protocol Buffers: seven bits a byte, the lowest
    first."""
    value = 0
    for shift in range(0, 64, 7):
        byte = read(1)
        if not byte:
            raise ValueError("the file ends in a number")
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    raise ValueError("a number has more than 64 bits")


def opened(path: Path) -> Graph:
    """Return the graph of a file. Raises `CheckpointError` if it is damaged, and `BackendError` if
    onnx is missing."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise BackendError(f"reading ONNX models needs the package onnx: {INSTALL}") from None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(
                f"{path} has more than 2 GiB, which an ONNX model cannot have; expected a smaller"
                " file"
            )
        data = read_regular(path, WEIGHTS)
        refuse_stand_in(path, data)
        model = onnx.load_model_from_string(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (DecodeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or not an ONNX model: {error}. Export or copy it again."
        ) from None
    take_squares(model)
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer} | dict(_constants(onnx, graph))
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            users.setdefault(name, []).append(node)
    return Graph(
        path,
        onnx,
        tuple(graph.node),
        tuple(each.name for each in graph.input if each.name not in stored),
        {name: node for node in graph.node for name in node.output},
        {name: tuple(nodes) for name, nodes in users.items()},
        stored,
        _classes(model),
        {each.key: each.value for each in model.metadata_props},
    )


def _constants(onnx: Any, graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that nodes of the type Constant hold."""
    for node in graph.node:
        for each in node.attribute:
            if (
                node.op_type == "Constant"
                and each.name == "value"
                and each.type == onnx.AttributeProto.TENSOR
            ):
                yield node.output[0], each.t


def _classes(model: Any) -> tuple[str, ...]:
    for each in model.metadata_props:
        if each.key == "classes":
            try:
                found = json.loads(each.value)
            except (ValueError, RecursionError):
                return ()
            return tuple(found) if is_list_of(is_text)(found) else ()
    return ()


def _array(graph: Graph, name: str) -> np.ndarray:
    """Return a stored constant. Raises `ValueError` if its bytes do not fit its shape or are not in
    the model's folder."""
    tensor = graph.stored[name]
    if tensor.data_location == graph.onnx.TensorProto.EXTERNAL:
        return _external(graph, tensor)
    try:
        return np.asarray(graph.onnx.numpy_helper.to_array(tensor))
    except (TypeError, LookupError) as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from None


def _external(graph: Graph, tensor: Any) -> np.ndarray:
    """Return a constant whose bytes are in another file of the model's folder."""
    about = {each.key: each.value for each in tensor.external_data}
    folder = graph.path.absolute().parent.resolve()
    try:
        file = (folder / about.get("location", "")).resolve()
        is_there = file.is_file()
    except OSError as error:  # such as of a name that is too long
        raise ValueError(
            f"{tensor.name!r} is in the file {about['location'][:60]!r}: {error.strerror}"
        ) from None
    if not file.is_relative_to(folder) or Path(about.get("location", "/")).is_absolute():
        raise ValueError(
            f"{tensor.name!r} is in the file {about.get('location')!r}, which is outside of the"
            " model's folder"
        )
    if is_there:
        refuse_stand_in(file)
    dtype = np.dtype(graph.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    offset = int(about.get("offset", "0"))
    count = math.prod(shape)
    length = int(about.get("length", str(count * dtype.itemsize)))
    if not is_there:
        raise ValueError(
            f"{tensor.name!r} is in the file {about['location']!r}, which is not next to the model;"
            " copy it there"
        )
    if (
        length != count * dtype.itemsize
        or offset < 0
        or count < 0
        or offset + length > file.stat().st_size
    ):
        raise ValueError(
            f"{tensor.name!r} needs {count * dtype.itemsize} bytes, which {about['location']!r}"
            " does not have"
        )
    try:
        with open_regular(file, WEIGHTS) as opened_file:
            return np.fromfile(opened_file, dtype, count, offset=offset).reshape(shape)
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from None
