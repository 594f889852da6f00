"""Nodes and constants of TensorFlow's graphs: a frozen GraphDef, or a SavedModel. Nothing of them
is run.

    frozen_graph.pb               a GraphDef: nodes, of which those of the type Const are weights
    saved_model.pb                a GraphDef with its signatures
    variables/variables.index     next to it: the weights, a tensor bundle (`tensor_bundle`)

Functions that a graph calls are put in place of their calls, as often as they are called, up to a
limit. Which variable of a SavedModel has which name in its bundle says the part of the graph that
restores them.

Both are messages of Protocol Buffers of at most 2 GiB. Sources:
tensorflow/core/framework/graph.proto, node_def.proto, attr_value.proto, tensor.proto,
function.proto, op_def.proto; core/protobuf/saved_model.proto, meta_graph.proto.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights.formats import numbers
from lockstep.weights.formats.protobuf import (
    find_fields,
    make_messages,
    map_entries,
    read_message,
    read_number,
    read_sizes,
)
from lockstep.weights.formats.tensor_bundle import DTYPES, Bundle, Entry, index_path

_FIELDS = {
    "Dim": "size=1:int64",
    "Shape": "dim=2:Dim* unknown_rank=3:bool",
    "Tensor": (
        "dtype=1:int32 tensor_shape=2:Shape tensor_content=4:bytes float_val=5:float*"
        " double_val=6:double* int_val=7:int32* string_val=8:bytes* int64_val=10:int64*"
        " half_val=13:int32*"
    ),
    "List": "s=2:bytes* i=3:int64*",
    "Function": "name=1:string",
    "Value": (
        "list=1:List s=2:bytes i=3:int64 f=4:float b=5:bool type=6:int32 shape=7:Shape"
        " tensor=8:Tensor func=10:Function"
    ),
    "Attribute": "key=1:string value=2:Value",
    "Node": "name=1:string op=2:string input=3:string* attr=5:Attribute*",
    "Argument": "name=1:string",
    "Signature": "name=1:string input_arg=2:Argument* output_arg=3:Argument*",
    "Return": "key=1:string value=2:string",
    "Definition": "signature=1:Signature node_def=3:Node* ret=4:Return*",
    "Library": "function=1:Definition*",
    "Graph": "node=1:Node* library=2:Library",
    "Place": "name=1:string",
    "Output": "key=1:string value=2:Place",
    "Service": "inputs=1:Output* outputs=2:Output*",
    "NamedService": "key=1:string value=2:Service",
    "Info": "tags=4:string*",
    "MetaGraph": "meta_info_def=1:Info graph_def=2:Graph signature_def=5:NamedService*",
    "SavedModel": "saved_model_schema_version=1:int64 meta_graphs=2:MetaGraph*",
}
"""The needed parts of TensorFlow's messages."""
message = make_messages("lockstep.graph", _FIELDS).__getitem__
"""Returns the class of a message."""

_MOST_PARTS = 300_000
"""Nodes, inputs and outputs of a graph with its functions in their places. Keras' export of
ResNet50 has 30,000."""
_MOST_DEPTH = 32
_MOST_REPEATED = 2**26
"""This many numbers may come from constants that store a number once for many elements, or be
computed from others."""
_OP = re.compile(rb"[A-Za-z_][A-Za-z0-9_>]*")
_SEVERAL_OUTPUTS = ("batch_", "reserve_space", "value_index")
"""What the names of the outputs of nodes with several outputs begin with, in functions."""
_RECORD = re.compile(r"\w*Summary(V2)?|Assert|NoOp|PrintV2")
"""Nodes that record values, and return none."""
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
_ASSIGNMENTS = ("Assign", "AssignVariableOp")
_STORED = {1: "float_val", 2: "double_val", 3: "int_val", 9: "int64_val"}
_STORED |= dict.fromkeys((14, 19), "half_val")
"""The fields of the values of constants, by TensorFlow's number of their type."""
NUMBERS = (*_STORED,)
"""Numbers of the types of constants that can be read."""
_STRING = 7
FLOATS = (1, 2, 14, 19)
"""Numbers of the types of floats."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operation. A value is the name of its node and its number among the outputs: `conv:0`."""

    name: str
    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def output(self) -> str:
        """The first output."""
        return f"{self.name}:0"


@dataclass
class FlatGraph:
    """A graph without calls of functions."""

    path: Path
    nodes: list[Node]
    outputs: tuple[str, ...]
    """The values that it returns: to a server if it is a SavedModel, else those that no node
    uses."""
    aliases: dict[str, str]
    """Values that are another value, since they are inputs or outputs of a function."""
    signatures: tuple[str, ...] = ()
    """The signature that is read, then the others; empty for a GraphDef."""
    bundle: Bundle | None = None
    """The variables of a SavedModel."""
    keys: dict[str, str] = field(default_factory=dict)
    """Their names in the bundle, by the name of their node."""
    _left: int = _MOST_REPEATED

    def actual(self, value: str) -> str:
        """Return a value without aliases."""
        for _ in range(4 * _MOST_DEPTH):
            if value not in self.aliases:
                return value
            value = self.aliases[value]
        raise ValueError(f"{value!r:.80} is an input or output of itself")

    def place(self, node: Node) -> str | None:
        """Return the name under which a constant is stored; None if the node is none."""
        if node.op == "Const":
            return node.name
        return self.keys.get(node.name, node.name) if node.op in VARIABLES else None

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a constant. Raises `ValueError` if it is not one, or not stored."""
        if node.op == "Const":
            shape = read_sizes(_get_tensor(node).tensor_shape)
        else:
            shape = self._find_entry(node).shape
        if len(shape) > 8 or min(shape, default=0) < 0:
            raise ValueError(f"{node.name!r:.80} has the shape {list(shape)!s:.80}")
        return shape

    def dtype(self, node: Node) -> int:
        """Return TensorFlow's number of the type of a constant. Raises `ValueError` if it is stored
        nowhere."""
        if node.op == "Const":
            return int(_get_tensor(node).dtype)
        return self._find_entry(node).dtype

    def array(self, node: Node) -> np.ndarray:
        """Return a constant as it is stored; bfloat16 becomes float32. Raises `ValueError` if its
        bytes do not fit."""
        size = math.prod(self.shape(node))
        stored = _count_stored(_get_tensor(node), size) if node.op == "Const" else 0
        self.charge(node, size - stored)
        if node.op == "Const":
            return _read_array(node, size)
        assert self.bundle is not None
        return self.bundle.read(str(self.place(node)))

    def charge(self, node: Node, more: int) -> None:
        """Note that a node makes numbers that the file does not store. Raises `ValueError` if these
        are too many."""
        self._left -= max(more, 0)
        if self._left < 0:
            raise ValueError(
                f"{node.name!r:.80} and others repeat more than {_MOST_REPEATED} numbers"
            )

    def allow(self, more: int) -> None:
        """Allow this many numbers of variables, each of which has 2 bytes or more in a file."""
        self._left += more

    def _find_entry(self, node: Node) -> Entry:
        """Return the entry of a variable in the bundle."""
        key = self.place(node)
        if key is None:
            raise ValueError(f"{node.name!r:.80} is computed, expected a constant")
        if self.bundle is None:
            raise ValueError(
                f"{node.name!r:.80} is a variable, so the graph is not frozen; give a SavedModel or"
                " checkpoint"
            )
        if key not in self.bundle.entries:
            raise ValueError(
                f"{node.name!r:.80} is a variable that {self.bundle.prefix.name} does not hold"
            )
        return self.bundle.entries[key]


def is_graph(path: Path) -> bool:
    """Return whether a file is a GraphDef: a message that has the fields of one, and begins with a
    node."""
    fields = find_fields(path, {1: 2, 2: 2, 3: 0, 4: 2, 5: 2})
    if 1 not in fields:
        return False
    with open_regular(path, WEIGHTS) as file:
        file.seek(fields[1])
        try:
            name = _read_field(file, b"\x0a")
            op = _read_field(file, b"\x12")
        except (OSError, ValueError):
            return False
    return bool(name) and _OP.fullmatch(op) is not None


def is_saved_model(path: Path) -> bool:
    """Return whether a file is a SavedModel: a message that has the fields of one, a version and a
    graph among them."""
    return find_fields(path, {1: 0, 2: 2}).keys() == {1, 2}


def _read_field(file: BinaryIO, tag: bytes) -> bytes:
    """Return the next text of a message. Raises `ValueError` if there is another field, or a long
    text."""
    if file.read(1) != tag:
        raise ValueError("it is a different field")
    length = read_number(file.read)
    if length > 1000:
        raise ValueError("it is a long string")
    return file.read(length)


def open_graph(path: Path) -> FlatGraph:
    """Return the graph of a file. Raises `CheckpointError` if it is damaged, or if a SavedModel has
    no variables."""
    kind = "Graph"
    description = "a frozen graph (GraphDef in binary form)"
    if path.name == "saved_model.pb" or is_saved_model(path):
        kind = "SavedModel"
        description = "a SavedModel"
    data = read_message(path, "a graph")
    try:
        parsed = message(kind).FromString(data)
    except DecodeError:
        raise CheckpointError(
            f"{path} is damaged or not {description}. Export or copy it again."
        ) from None
    try:
        if kind == "Graph":
            return _flatten(path, parsed)
        meta = _choose_graph(parsed)
        signatures = _list_signatures(meta)
        graph = _flatten(path, meta.graph_def)
        graph.signatures = tuple(signatures)
        service = signatures[graph.signatures[0]]
        graph.outputs = tuple(_name_value(entry.value.name, "", False) for entry in service.outputs)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    prefix = path.parent / "variables" / "variables"
    if index_path(prefix).is_file():
        graph.bundle = Bundle(prefix)
        shards = prefix.parent.glob("variables.data-*")
        graph.allow(sum(shard.stat().st_size for shard in shards) // 2)
        graph.keys = dict(_find_keys(graph))
    return graph


def _choose_graph(model: Any) -> Any:
    """Return the graph for servers."""
    if not model.meta_graphs:
        raise ValueError("it has no graph")
    return max(model.meta_graphs, key=lambda meta: "serve" in meta.meta_info_def.tags)


def _list_signatures(meta: Any) -> dict[str, Any]:
    """Return the signatures that take and return something by name, the usual one first."""
    signatures = map_entries(meta.signature_def)
    usable = {name: entry for name, entry in signatures.items() if entry.inputs and entry.outputs}
    if not usable:
        raise ValueError("it has no signature such as serving_default; save it with one")
    return dict(sorted(usable.items(), key=lambda entry: entry[0] != "serving_default"))


def _name_value(text: str, prefix: str, is_in_function: bool) -> str:
    """Return the value that an input names: `node`, `node:1`, and in functions `argument` or
    `node:output:1`."""
    name, *others = text.split(":")
    if not others:
        return f"{prefix}{name}:0"
    if is_in_function and len(others) == 2 and others[0].startswith(_SEVERAL_OUTPUTS):
        return f"{prefix}{name}:{others[0]}:{others[1]}"
    return f"{prefix}{name}:{others[-1]}"


class _Flattening:
    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.nodes: list[Node] = []
        self.aliases: dict[str, str] = {}
        self._functions = functions
        self._left = _MOST_PARTS
        self._calls = 0

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise ValueError(
                f"it has more than {_MOST_PARTS} nodes, with functions in place of their calls"
            )

    def add(self, definitions: Any, prefix: str = "", depth: int = 0) -> None:
        """Add nodes, and those of the functions that they call."""
        if depth > _MOST_DEPTH:
            raise ValueError(f"its functions call each other {_MOST_DEPTH} deep")
        for node in definitions:
            self._count(1 + len(node.input))
            values = [text for text in node.input if not text.startswith("^")]
            inputs = tuple(_name_value(text, prefix, depth > 0) for text in values)
            attributes = map_entries(node.attr)
            function = attributes["f"].func.name if node.op in _CALLS and "f" in attributes else ""
            if function in self._functions:
                self._call(self._functions[function], f"{prefix}{node.name}", inputs, depth)
            elif node.op == "IdentityN":
                for number, value in enumerate(inputs):
                    self.aliases[f"{prefix}{node.name}:{number}"] = value
            else:
                self.nodes.append(Node(f"{prefix}{node.name}", node.op, inputs, attributes))

    def _call(self, function: Any, name: str, inputs: tuple[str, ...], depth: int) -> None:
        signature = function.signature
        self._calls += 1
        prefix = f"{self._calls}//"
        self._count(len(signature.input_arg) + len(signature.output_arg) + len(function.ret))
        for argument, value in zip(signature.input_arg, inputs, strict=False):
            self.aliases[f"{prefix}{argument.name}:0"] = value
        results = map_entries(function.ret)
        for number, argument in enumerate(signature.output_arg):
            value = _name_value(results.get(argument.name, ""), prefix, True)
            self.aliases[f"{name}:{number}"] = value
        self.add(function.node_def, prefix, depth + 1)


def _flatten(path: Path, graph: Any) -> FlatGraph:
    functions = {function.signature.name: function for function in graph.library.function}
    flattening = _Flattening(functions)
    flattening.add(graph.node)
    nodes, aliases = flattening.nodes, flattening.aliases
    used = {value.partition(":")[0] for node in nodes for value in node.inputs}
    used |= {value.partition(":")[0] for value in aliases.values()}
    used |= {node.name for node in nodes if _RECORD.fullmatch(node.op)}
    values = [value for value in (*aliases, *(node.output for node in nodes)) if "//" not in value]
    outputs = [value for value in values if value.partition(":")[0] not in used]
    return FlatGraph(path, nodes, tuple(outputs), aliases)


def _find_keys(graph: FlatGraph) -> Iterator[tuple[str, str]]:
    """Yield the variables that a SavedModel restores, and their names in its bundle."""
    makers = {node.output: node for node in graph.nodes}
    keys = _name_restored(graph, makers)
    for node in graph.nodes:
        if node.op not in _ASSIGNMENTS or len(node.inputs) < 2:
            continue
        variable = makers.get(graph.actual(node.inputs[0]))
        place = graph.actual(node.inputs[1])
        value = makers.get(place)
        if value is not None and value.op == "Identity" and value.inputs:
            place = graph.actual(value.inputs[0])
        if variable is not None and variable.op in VARIABLES and place in keys:
            yield variable.name, keys[place]


def _name_restored(graph: FlatGraph, makers: Mapping[str, Node]) -> dict[str, str]:
    """Return the names in the bundle of the values that are restored."""
    keys = {}
    for node in graph.nodes:
        names = None
        if node.op == "RestoreV2" and len(node.inputs) > 1:
            names = makers.get(graph.actual(node.inputs[1]))
        if names is not None and names.op == "Const":
            for number, text in enumerate(_get_tensor(names).string_val):
                keys[f"{node.name}:{number}"] = text.decode(errors="replace")
    return keys


def _get_tensor(node: Node) -> Any:
    return node.attributes["value"].tensor if "value" in node.attributes else message("Tensor")()


def decode_text(node: Node) -> str:
    """Return the constant text of a node. Raises `ValueError` if it has none."""
    tensor = _get_tensor(node)
    if node.op != "Const" or tensor.dtype != _STRING or len(tensor.string_val) != 1:
        raise ValueError(f"{node.name!r:.80} is not a string")
    try:
        return bytes(tensor.string_val[0]).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{node.name!r:.80} is not in UTF-8") from None


def _count_stored(tensor: Any, size: int) -> int:
    """Return how many numbers a file has for a constant of this size."""
    if tensor.tensor_content:
        return size
    return len(getattr(tensor, _STORED.get(tensor.dtype, "float_val")))


def _read_array(node: Node, size: int) -> np.ndarray:
    """Return a constant. The last number that is stored stands for all that follow."""
    tensor = _get_tensor(node)
    if tensor.dtype not in _STORED:
        raise ValueError(
            f"{node.name!r:.80} is of TensorFlow's type {tensor.dtype}, expected floats or integers"
        )
    dtype = DTYPES[tensor.dtype]
    name = _STORED[tensor.dtype]
    shape = read_sizes(tensor.tensor_shape)
    if tensor.tensor_content:
        if len(tensor.tensor_content) != size * dtype.itemsize:
            raise ValueError(
                f"{node.name!r:.80} has {len(tensor.tensor_content)} bytes, which do not fit"
                f" {list(shape)}"
            )
        return numbers(np.frombuffer(tensor.tensor_content, dtype).reshape(shape))
    stored = getattr(tensor, name)
    if len(stored) > size:
        raise ValueError(f"{node.name!r:.80} has {len(stored)} numbers for the shape {list(shape)}")
    if name == "half_val":
        values = np.array(stored, np.int64).astype("<u2").view(dtype)
    else:
        values = np.array(stored, dtype)
    filled = np.zeros(size, dtype)
    filled[: len(values)] = values
    if len(values):
        filled[len(values) :] = values[-1]
    return numbers(filled.reshape(shape))
