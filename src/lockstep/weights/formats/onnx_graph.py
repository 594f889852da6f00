"""Nodes and constants of an ONNX file. Nothing of it is run, and only files in its folder are read.

A constant can be stored in another file (external data). Its name must lie inside the model's
folder, and the bytes it names must exist. The package onnx parses the file, which is a message of
Protocol Buffers of at most 2 GiB.

Source: onnx.proto and ExternalData.md of ONNX.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.system.strict_json import is_list_of, is_text, parsed
from lockstep.weights.formats.lfs_pointers import refuse_stand_in
from lockstep.weights.formats.onnx_photos import remove_resize
from lockstep.weights.formats.protobuf import (
    map_entries,
    read_message,
    split_message,
    write_field,
)
from lockstep.weights.formats.resnet_graph import ROUNDING, Graph, label_node

INSTALL = "pip install onnx==1.23.2"

_LAYING_OUT = ("Constant", "Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze")
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Log", "Exp", "Sqrt", "Reciprocal")
_COMPUTED = (*_LAYING_OUT, *_ARITHMETIC, *ROUNDING)
"""Nodes that make a constant from others, no larger than these."""
INTEGERS = (2, 4, 5, 6, 7, 12, 13)
"""ONNX's numbers of the types of integers that hold 255."""
_PLAIN = (1, 2, 3, 6, 7)
"""ONNX's numbers of the types of attributes that are numbers, lists of them, or texts."""
_HALVES = (10, 16)
"""Those of float16 and bfloat16."""
_MOST_STEPS = 16
"""A constant is followed through at most this many nodes."""
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9
"""Numbers of fields: of a model, of a graph, and of a constant."""
_LARGE_BYTES = 1024
"""Constants from this size on can be apart."""


@dataclass(kw_only=True)
class OnnxGraph(Graph):
    """The graph of a model."""

    path: Path
    onnx: Any
    """The package."""
    model: Any
    """The ModelProto, without a resize that `lockstep export` wrote."""
    image_type: int
    """ONNX's number of the type of its images."""
    makers: dict[str, Any]
    """The node that makes each value."""
    stored: dict[str, Any]
    """Constants by name, as TensorProto."""
    classes: tuple[str, ...]
    """Names of the classes, if `lockstep export` wrote them."""
    metadata: dict[str, str]
    """The properties of the model that its writer chose."""
    opsets: Sequence[Any]
    """The versions of its operators."""
    ir_version: int
    unused: Sequence[Any]
    """Nodes that no output is computed from; they are not among `nodes`."""
    apart: dict[str, memoryview]
    """Bytes of stored constants that are not in the model, by name."""
    computed: dict[str, np.ndarray | None] = field(default_factory=dict)
    """Values that were computed from constants, by name; None for those that are not."""

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of a node's attribute."""
        for attribute in node.attribute:
            if attribute.name == name:
                return self.onnx.helper.get_attribute_value(attribute)
        return default

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant, also one that nodes of the types `_COMPUTED` make of others; None if
        it is computed from images.

        Raises `ValueError` if its bytes do not fit its shape or lie outside of the model's folder.
        """
        if name in self.stored:
            return self.read(name)
        if name not in self.computed:
            self.computed[name] = self._compute(self.makers.get(name))
        return self.computed[name]

    def read(self, name: str) -> np.ndarray:
        """Return a stored constant as it is. Raises `ValueError` as `constant` does."""
        tensor = self.stored[name]
        if tensor.data_location == self.onnx.TensorProto.EXTERNAL:
            return _read_external(self, tensor)
        try:
            if name in self.apart:
                dtype = self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                array = np.frombuffer(self.apart[name], dtype).reshape(tensor.dims)
                return np.require(array, requirements="A")
            return np.asarray(self.onnx.numpy_helper.to_array(tensor))
        except (TypeError, LookupError) as error:
            raise ValueError(f"{name!r} cannot be read: {error}") from None

    def _compute(self, node: Any) -> np.ndarray | None:
        """Return the constant that a node makes, as ONNX's reference computes it."""
        if node is None or node.op_type not in _COMPUTED:
            return None
        if any(entry.type not in _PLAIN for entry in node.attribute):
            return None
        arrays = {}
        for name in filter(None, node.input):
            array = self.constant(name)
            if array is None:
                return None
            arrays[name] = array
        label = label_node(node)
        try:
            largest = max(map(np.size, arrays.values()), default=0)
            if node.op_type in _ARITHMETIC and np.broadcast(*arrays.values()).size > largest:
                raise ValueError("it is larger than the constants that it is made of")
            with np.errstate(all="ignore"):
                return _run_reference(self, node, arrays)
        except Exception as error:  # the reference's have no common base
            raise ValueError(f"{label} cannot be computed: {error!s:.200}") from None

    def place(self, name: str) -> str | None:
        """Return the stored constant that a value is or is made of first; None if there is none."""
        for _ in range(_MOST_STEPS):
            maker = self.makers.get(name)
            if name in self.stored or maker is None or maker.op_type not in _COMPUTED:
                break
            name = maker.input[0] if maker.input else ""
        return name if name in self.stored else None

    def describe_arrays(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, type and shape of every stored constant."""
        for name, tensor in self.stored.items():
            try:
                kind = np.dtype(self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).name
            except (LookupError, TypeError):
                kind = f"type {tensor.data_type}"
            yield name, kind, tuple(tensor.dims)

    def list_files(self) -> tuple[Path, ...]:
        """Return the other files of the model's folder in which constants are stored."""
        places = set()
        for tensor in self.stored.values():
            for entry in tensor.external_data:
                if entry.key == "location":
                    places.add(entry.value)
        return tuple(self.path.parent / place for place in sorted(places))

    def list_halves(self) -> list[str]:
        """Return the names of constants of at least two axes that have fewer bits than float32."""
        tensors = [tensor for tensor in self.stored.items() if len(tensor[1].dims) > 1]
        return [name for name, tensor in tensors if tensor.data_type in _HALVES]

    @property
    def rounds(self) -> bool:
        """Whether it computes with integers, or in half precision."""
        for node in self.nodes:
            is_half = node.op_type == "Cast" and self.attribute(node, "to", 1) in _HALVES
            if is_half or node.op_type in ROUNDING:
                return True
        return self.image_type in _HALVES or bool(self.list_halves())


def open_graph(path: Path, *, apart: bool = False) -> OnnxGraph:
    """Return the graph of a file, with its large constants in the model or apart from it, where
    nobody parses or copies them.

    Raises `CheckpointError` if it is damaged, and `BackendError` if onnx is missing.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise BackendError(f"reading ONNX models needs the package onnx: {INSTALL}") from None
    data = read_message(path, "an ONNX model")
    skeleton, large = _take_apart(data) if apart else (data, {})
    try:
        model = onnx.load_model_from_string(skeleton)
    except (DecodeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or not an ONNX model: {error}. Export or copy it again."
        ) from None
    remove_resize(model)
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    nodes = list(graph.node)
    for node in nodes:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
                stored[node.output[0]] = attribute.t
    makers: dict[str, Any] = {}
    for node in nodes:
        makers |= dict.fromkeys(node.output, node)
    outputs = [value.name for value in graph.output]
    names = _find_needed(makers, outputs)
    inputs = [value for value in graph.input if value.name not in stored]
    tensor = inputs[0].type.tensor_type if inputs else onnx.TypeProto.Tensor()
    image_type = tensor.elem_type or onnx.TensorProto.FLOAT
    metadata = map_entries(model.metadata_props)
    return OnnxGraph(
        path=path,
        onnx=onnx,
        model=model,
        nodes=[node for node in nodes if names.intersection(node.output)],
        unused=[node for node in nodes if not names.intersection(node.output)],
        apart=large,
        inputs=[value.name for value in inputs],
        outputs=outputs,
        constants={},
        places={},
        image_type=image_type,
        takes_bytes=image_type in INTEGERS,
        sizes=[dim.dim_value for dim in tensor.shape.dim[1:]],
        makers=makers,
        stored=stored,
        classes=_read_classes(metadata),
        metadata=metadata,
        opsets=model.opset_import,
        ir_version=model.ir_version,
    )


def _take_apart(data: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """Return a model without the bytes of its large initializers, and these by name. A model that
    is damaged, or names two initializers alike, stays whole."""
    file = io.BytesIO(data)
    whole = memoryview(data)
    large: dict[str, memoryview] = {}
    parts: list[Any] = []
    names = []
    try:
        outer = split_message(file, 0, len(data))
        [graph] = [field for field in outer if (field.number, field.kind) == (_GRAPH, 2)]
        for field in split_message(file, graph.content, graph.end):
            parts.append(whole[field.begin : field.end])
            if field.number != _INITIALIZER:
                continue
            inner = list(split_message(file, field.content, field.end))
            last = {entry.number: entry for entry in inner}  # it counts, of those with one number
            names.append(str(whole[last[_NAME].content : last[_NAME].end], "utf-8"))
            raw = last.get(_RAW_DATA)
            if raw is not None and raw.end - raw.content >= _LARGE_BYTES:
                large[names[-1]] = whole[raw.content : raw.end]
                rest = [whole[e.begin : e.end] for e in inner if e.number != _RAW_DATA]
                parts[-1] = write_field(_INITIALIZER, b"".join(rest))
    except (ValueError, LookupError):
        return data, {}
    if len(names) > len(set(names)):
        return data, {}
    inside = write_field(_GRAPH, b"".join(parts))
    return b"".join([whole[: graph.begin], inside, whole[graph.end :]]), large


def _find_needed(makers: dict[str, Any], outputs: Iterable[str]) -> set[str]:
    """Return the values that outputs are computed from."""
    waiting = list(outputs)
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += makers[name].input if name in makers else ()
    return needed


def _read_classes(metadata: Mapping[str, str]) -> tuple[str, ...]:
    try:
        classes = parsed(metadata.get("classes", "[]"))
    except (ValueError, RecursionError):
        return ()
    return tuple(classes) if is_list_of(is_text)(classes) else ()


def _run_reference(graph: OnnxGraph, node: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return what ONNX's reference computes by a node of constants."""
    from onnx.reference import ReferenceEvaluator

    helper: Any = graph.onnx.helper
    inputs: Any = []
    for name, array in arrays.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
    outputs = [graph.onnx.ValueInfoProto(name=node.output[0])]
    alone = helper.make_graph([node], "constant", inputs, outputs)
    opsets = graph.opsets
    if node.op_type in ROUNDING:  # the reference lacks versions of them, which compute the same
        opsets = (helper.make_opsetid("", 21),)
    model = helper.make_model(alone, opset_imports=opsets, ir_version=graph.ir_version)
    results: Any = ReferenceEvaluator(model).run(None, arrays)
    return np.asarray(results[0])


def _read_external(graph: OnnxGraph, tensor: Any) -> np.ndarray:
    """Return a constant whose bytes are in another file of the model's folder."""
    about = map_entries(tensor.external_data)
    location = about.get("location", "")
    problem = f"{tensor.name!r} is in the file {location[:60]!r}"
    folder = graph.path.absolute().parent.resolve()
    try:
        file = (folder / location).resolve()
        is_there = file.is_file()
    except OSError as error:  # such as of a name that is too long
        raise ValueError(f"{problem}: {error.strerror}") from None
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise ValueError(f"{problem}, which is outside of the model's folder")
    if not is_there:
        raise ValueError(f"{problem}, which is not next to the model; copy it there")
    refuse_stand_in(file)
    dtype = np.dtype(graph.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    offset = int(about.get("offset", "0"))
    count = math.prod(shape)
    size = count * dtype.itemsize
    length = int(about.get("length", str(size)))
    end = offset + length
    if length != size or offset < 0 or count < 0 or end > file.stat().st_size:
        raise ValueError(f"{tensor.name!r} needs {size} bytes, which {location!r} does not have")
    try:
        with open_regular(file, WEIGHTS) as opened_file:
            return np.fromfile(opened_file, dtype, count, offset=offset).reshape(shape)
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from None
