"""The graph of an MXNet network (`-symbol.json`), translated to ONNX's terms: `translate`.

A symbol is a list of nodes in the order of computation. A node has an operator ("null" for a
variable), a name, attributes as text, and its inputs, [node, output, version]. Attributes with the
operator's default value may be missing.

Values are NCHW in the translation, whatever the order of their axes in the symbol. A graph is
refused by the name of the first node whose operator, attributes or inputs have no translation,
unless no output is computed from it.

Source: nnvm's pass/saveload_json.cc, MXNet's src/nnvm/legacy_json_util.cc and src/operator, and
files that MXNet 1.9.1 wrote.
"""

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.system.strict_json import parsed
from lockstep.weights.formats import DAMAGE, numbers
from lockstep.weights.formats.resnet_graph import Graph, Operator, label_node

_ORDER = "NCHW"
FLOATS = ("float16", "float32", "float64", "bfloat16")
_OFF = ("None", "False", "()", "[]")
_WITHOUT_EFFECT = re.compile(
    r"__\w+__|\w*(?:ctx_group|lr_mult|wd_mult|force_mirroring|mirror_stage)|workspace|cudnn_\w+"
    r"|momentum|use_global_stats|output_mean_var|m(?:in|ax)_calib_range|ndev|key|num_filter"
    r"|num_hidden|num_args|num_outputs|cast_narrow|p|axes|p_value|count_include_pad|is_int|dtype"
    r"|grad_scale|ignore_label|use_ignore|normalization|out_grad|smooth_alpha"
)
"""Attributes that change nothing in inference, where a translation does not read them."""
_ENDLESS = 2**31 - 1
_UNKNOWN = "MXNet's "
"""What the operators begin with that have no translation."""


@dataclass(frozen=True)
class _Value:
    name: str
    axes: str = ""
    """The order of its axes in the symbol, such as "NHWC" or "NC"; "" if it is unknown."""
    array: np.ndarray | None = None
    """Its numbers, if it is constant."""
    is_input: bool = False
    """Whether it is a variable without an array: images, labels, or what is missing."""

    def find_axis(self, place: int) -> int:
        """Return where an axis is in the translation. Raises `IndexError` if there is none."""
        return sorted(self.axes, key=_ORDER.index).index(self.axes[place])


@dataclass
class Node:
    """A node, and its translation."""

    name: str
    operator: str
    attributes: Mapping[str, str]
    entries: list[tuple[int, int]]
    """The nodes and outputs that its inputs are."""
    inputs: list[_Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """Its name, after that of the variable, is the name of each constant."""
    unread: set[str] = field(default_factory=set)
    """Attributes that the translation did not read."""

    @property
    def kind(self) -> str:
        """The operator, the same for all of its names in versions of MXNet."""
        if self.operator == "Softmax":
            return "softmaxoutput"
        return re.sub("_|v1$", "", self.operator.lower())

    def text(self, name: str, default: str = "") -> str:
        """Return an attribute."""
        self.unread.discard(name)
        value = self.attributes.get(name, "None")
        return default if value == "None" else value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return an attribute that is true or false."""
        return self.text(name, str(default)).lower() in ("true", "1")

    def integers(self, name: str) -> list[int]:
        """Return an attribute that is a tuple of integers, or one; empty if it is missing."""
        return [int(text) for text in re.findall("-?[0-9]+", self.text(name))]

    def add(self, kind: str, *inputs: _Value, order: str = "", **attributes: Any) -> _Value:
        """Add an operator and return what it computes. The order of its axes is by default that of
        the node's first input."""
        names = []
        for value in inputs:
            names.append(value.name)
            if value.array is not None:
                names[-1] = f"{value.name} of {self.name}"
                self.constants[names[-1]] = value.array
        name = self.name
        if self.operators:
            name += f" ({kind})"
        self.operators.append(Operator(kind, names, [name], attributes))
        return _Value(name, order or self.inputs[0].axes)

    def add_unknown(self, output: int) -> _Value:
        """Add an operator that no network has for an output without a translation."""
        kind = f"{_UNKNOWN}{self.operator}"
        for name in self.attributes.keys() & {"act_type", "pool_type"}:
            kind += f" ({self.attributes[name]})"
        value = _Value(self.name)
        if output:
            value = _Value(f"{self.name} (output {output})")
        names = [value.name for value in self.inputs]
        self.operators.append(Operator(kind, names, [value.name]))
        return value


_Values = _Value | list[_Value] | None
"""What a rule makes of a node: its outputs; None if it has no translation."""


@dataclass(frozen=True)
class Symbol:
    """A graph in ONNX's terms."""

    nodes: list[Node]
    heads: list[tuple[int, int]]
    """The nodes and outputs that the graph returns."""
    graph: Graph
    channels_last: bool
    """Whether it takes images as NHWC."""

    @property
    def variables(self) -> set[str]:
        """Names of all variables, images and labels included."""
        return {node.name for node in self.nodes if node.kind == "null"}


def translate(path: Path, text: bytes, arrays: Mapping[str, np.ndarray]) -> Symbol:
    """Return the graph in the text of a file, with these arrays as its variables.

    Raises `CheckpointError` if the text is damaged, and `ValueError` if an array is missing or does
    not fit, or if a node has no translation.
    """
    for axes in ("NHWC", _ORDER):
        nodes, heads = _load(path, text)
        outputs = _translate_nodes(nodes, heads, arrays, axes)
        stem = next((node for node in nodes if node.kind == "convolution"), None)
        if stem is None or stem.operators[0].op_type == "Conv":
            break
    needed = set(outputs)
    operators = [operator for node in nodes for operator in node.operators]
    for operator in reversed(operators):
        if needed.intersection(operator.output):
            needed.update(operator.input)
    operators = [operator for operator in operators if needed.intersection(operator.output)]
    for operator in operators:
        if operator.op_type.startswith(_UNKNOWN):
            raise ValueError(
                f"{label_node(operator)} has no place in a ResNet, so results would differ"
            )
    unset = needed - arrays.keys()
    images = [node for node in nodes if node.kind == "null" and node.name in unset]
    constants = ChainMap(*(node.constants for node in nodes))
    places = {name: name.partition(" of ")[0] for name in needed & constants.keys()}
    graph = Graph(
        operators,
        [node.name for node in images],
        outputs,
        constants,
        {name: place for name, place in places.items() if place in arrays},
        takes_bytes=_take_integers(images),
    )
    return Symbol(nodes, heads, graph, axes != _ORDER)


def _take_integers(images: Iterable[Node]) -> bool:
    """Return whether images are integers. Raises `ValueError` if these do not hold 255."""
    types = {node.attributes.get("__dtype__", "0") for node in images}
    if types & {"5", "7"}:
        raise ValueError("its images are int8 or bool, expected floats or integers that hold 255")
    return not types <= {"-1", "0", "1", "2", "12"}


def _load(path: Path, text: bytes) -> tuple[list[Node], list[tuple[int, int]]]:
    """Return the nodes of a graph, and what its outputs are."""
    try:
        graph = parsed(text)
        nodes = list(_read_nodes(graph["nodes"]))
        return nodes, _read_entries(graph["heads"], len(nodes))
    except (AttributeError, *DAMAGE) as error:
        raise CheckpointError(
            f"{path} is damaged or not an MXNet graph: {type(error).__name__}, {error}. Copy it"
            " again, or remove it to recognise the model by its arrays alone."
        ) from None


def _read_nodes(nodes: list[dict[str, Any]]) -> Iterator[Node]:
    names = set()
    for number, node in enumerate(nodes):
        attributes: dict[str, str] = {}
        # Versions of MXNet use three different names for attributes.
        for key in ("attr", "attrs", "param"):
            attributes |= node.get(key, {})
        for key, value in attributes.items():
            if not isinstance(value, str):
                raise TypeError(f"{key} of node {number} is {value!r}, expected a string")
        name = str(node["name"])
        if name in names and node["op"] != "null":  # of a layer that is used twice
            name = f"{name} (node {number})"
        names.add(name)
        yield Node(name, str(node["op"]), attributes, _read_entries(node["inputs"], number))


def _read_entries(entries: list[list[int]], end: int) -> list[tuple[int, int]]:
    """Return numbers of nodes and of their outputs. Inputs come before the nodes that use them."""
    for entry in entries:
        if not 0 <= entry[0] < end:
            raise ValueError(f"node {end} has the input {entry[0]}")
    return [(int(entry[0]), int(entry[1])) for entry in entries]


def _translate_nodes(
    nodes: list[Node], heads: list[tuple[int, int]], arrays: Mapping[str, np.ndarray], axes: str
) -> list[str]:
    """Translate nodes for images with these axes. Return the names of the heads."""
    values: dict[tuple[int, int], _Value] = {}

    def find_value(entry: tuple[int, int]) -> _Value:
        return values.get(entry) or nodes[entry[0]].add_unknown(entry[1])

    for number, node in enumerate(nodes):
        made: _Value | list[_Value] = _Value(node.name, axes, is_input=True)
        if node.name in arrays:
            made = _Value(node.name, array=numbers(arrays[node.name]))
        if node.kind != "null":
            node.inputs = [find_value(entry) for entry in node.entries]
            made = _translate(node)
        outputs = made if isinstance(made, list) else [made]
        values |= {(number, i): value for i, value in enumerate(outputs)}
    return [find_value(head).name for head in heads]


def _translate(node: Node) -> _Value | list[_Value]:
    """Return the outputs of a node, to which its translation is added."""
    node.unread = set(node.attributes)
    for value in node.inputs[1:]:
        if value.is_input and not node.kind.endswith("output"):  # of a loss, which takes labels
            raise ValueError(f"{node.name!r} needs {value.name!r}, which is not among its arrays")
    values = None
    try:
        if all(value.axes or value.array is not None for value in node.inputs):
            values = _RULES.get(node.kind, _combine)(node)
    except (LookupError, AttributeError):  # there is no such axis, input, array or kind
        pass
    except ValueError as error:
        raise ValueError(f"{node.operator} {node.name!r}: {error}") from None
    unread = [name for name in node.unread if not _WITHOUT_EFFECT.fullmatch(name)]
    if values is not None and all(node.attributes[name] in _OFF for name in unread):
        return values
    node.operators.clear()
    return node.add_unknown(0)


# Rules for operators


def _number(text: str) -> _Value:
    """Return a constant of the graph: a number, or one for each channel."""
    column = [[[float(number)]] for number in re.findall(r"[^\s,()\[\]]+", text)]
    return _Value(text, array=np.array(column, np.float32))


def _pass(node: Node) -> _Values:
    is_exact = node.text("dtype", "float32") in FLOATS
    return node.inputs if is_exact and node.text("mode", "training") == "training" else None


def _rename(node: Node) -> _Values:
    kind = _RENAMED[node.text("act_type") if node.kind == "activation" else node.kind]
    if kind in ("ArgMax", "TopK"):
        node.unread.clear()
    return node.add(kind, node.inputs[0])


def _prepare(node: Node) -> _Values:
    """Translate Gluon's ToTensor and Normalize."""
    value = node.inputs[0]
    if (node.kind, value.axes) == ("imagetotensor", "NHWC"):
        return node.add("Div", value, _number("255"), order=_ORDER)
    if (node.kind, value.axes) != ("imagenormalize", _ORDER):
        return None
    for kind, name in (("Sub", "mean"), ("Div", "std")):
        value = node.add(kind, value, _number(node.text(name)))
    return value


def _transpose(node: Node) -> _Values:
    x = node.inputs[0]
    rank = len(x.axes) or np.ndim(x.array)  # type: ignore[arg-type]
    order = node.integers("axes") or list(range(rank))[::-1]
    if sorted(order) != list(range(rank)):
        return None
    if x.array is not None:
        return replace(x, array=x.array.transpose(order))
    axes = "".join(x.axes[i] for i in order)
    return replace(x, axes=axes) if axes in (_ORDER, "NHWC") else None


def _convolve(node: Node) -> _Values:
    x, weight, *biases = node.inputs
    layout = node.text("layout", _ORDER)
    kernel = node.integers("kernel")
    groups = int(node.text("num_group", "1"))
    if weight.array is None or x.axes != layout or node.flag("no_bias") == bool(biases):
        return None
    array = weight.array
    if layout == "NHWC":
        array = array.transpose(0, 3, 1, 2)
    if list(array.shape[2:]) != kernel:
        size = list(weight.array.shape)
        raise ValueError(f"{weight.name} is {size}, expected a kernel of {kernel} in {layout}")
    if x.is_input and (array.shape[1], groups) == (4, 1):
        array = array[:, :3]  # the fourth channel of images is 0
    return node.add(
        "Conv",
        x,
        replace(weight, array=array),
        *biases,
        group=groups,
        strides=node.integers("stride") or [1, 1],
        dilations=node.integers("dilate") or [1, 1],
        pads=(node.integers("pad") or [0, 0]) * 2,
    )


def _normalise(node: Node) -> _Values:
    """Translate batch norms. Some of NVIDIA's MXNet include the sum with a shortcut, and Relu."""
    x, *others = node.inputs
    addends = [value for value in others if value.array is None]
    gamma, *constants = [value for value in others if value.array is not None]
    sums = [x.axes] * (node.kind == "batchnormaddrelu")
    activation = node.text("act_type", "relu" * len(sums))
    if x.axes[int(node.text("axis", "1"))] != "C" or [value.axes for value in addends] != sums:
        return None
    if node.flag("fix_gamma", default=True):
        gamma = _Value("ones", array=np.ones_like(gamma.array))
    epsilon = float(node.text("eps", "0.001"))
    value = node.add("BatchNormalization", x, gamma, *constants, epsilon=epsilon)
    for addend in addends:
        value = node.add("Add", value, addend)
    return node.add(_RENAMED[activation], value) if activation else value


def _pool(node: Node) -> _Values:
    x = node.inputs[0]
    kind = {"max": "MaxPool", "avg": "AveragePool"}[node.text("pool_type", "max")]
    ceils = {"valid": 0, "full": 1}[node.text("pooling_convention", "valid")]
    kernel = node.integers("kernel")
    strides = node.integers("stride") or [1, 1]
    pads = (node.integers("pad") or [0, 0]) * 2
    if x.axes != node.text("layout", _ORDER):
        return None
    if node.flag("global_pool"):
        return node.add(f"Global{kind}", x)
    return node.add(kind, x, kernel_shape=kernel, strides=strides, pads=pads, ceil_mode=ceils)


def _reshape(node: Node) -> _Values:
    x = node.inputs[0]
    shape = node.integers("shape") or [0, -1]  # as Flatten
    if x.array is not None and 0 not in shape and min(shape) >= -1:
        return replace(x, array=x.array.reshape(shape))
    is_known = len(shape) in (1, 2, 4) and shape[0] in (0, -1) and min(shape) >= -1
    if not is_known or (0 in shape[1:] and x.axes[1] != "C"):
        return None
    size = _Value("shape", array=np.array(shape))
    return node.add("Reshape", x, size, order=_ORDER[: len(shape)])


def _connect(node: Node) -> _Values:
    x, *others = node.inputs
    flattens = node.flag("flatten", default=True)
    if len(others) != 2 - node.flag("no_bias") or (x.axes != "NC" and not flattens):
        return None
    if len(x.axes) == 4:
        x = node.add("Flatten", x, order="NC")
    return node.add("Gemm", x, *others, order="NC", transB=1)


def _softmax(node: Node) -> _Values:
    (x,) = node.inputs
    axis = x.find_axis(int(node.text("axis", "-1")))
    temperature = node.text("temperature")
    if temperature:
        x = node.add("Div", x, _number(temperature))
    return node.add({"logsoftmax": "LogSoftmax"}.get(node.kind, "Softmax"), x, axis=axis)


def _softmax_of_training(node: Node) -> _Values:
    """Translate a softmax of all axes but the first. Its labels have no effect."""
    if node.inputs[0].axes == "NC":
        node.unread -= {"multi_output", "preserve_shape", "mode"}
    return node.add("Softmax", node.inputs[0], axis=1)


def _slice(node: Node) -> _Values:
    """Translate slices along an axis, and values backwards."""
    x = node.inputs[0]
    axes = [x.find_axis(place) for place in node.integers("axis")]
    count = len(axes)
    attributes: dict[str, Any] = {"axes": axes}
    attributes |= {"starts": [-1] * count, "ends": [-_ENDLESS] * count, "steps": [-1] * count}
    if node.kind == "sliceaxis":
        ends = node.integers("end") or [_ENDLESS]
        attributes |= {"starts": node.integers("begin"), "ends": ends, "steps": [1]}
    return node.add("Slice", x, **attributes)


def _take(node: Node) -> _Values:
    x, indices = node.inputs
    places = indices.array.astype(np.int64)  # type: ignore[union-attr]
    if (places != indices.array).any():
        return None
    if node.text("mode", "clip") == "clip":
        places = np.maximum(places, 0)
    axis = x.find_axis(int(node.text("axis", "0")))
    return node.add("Gather", x, replace(indices, array=places), axis=axis)


def _combine(node: Node) -> _Values:
    """Translate arithmetic of two values, of a value and a constant, or of a value and a number."""
    match = _ARITHMETIC.fullmatch(node.kind)
    axes = {value.axes for value in node.inputs if value.array is None}
    if match is None or len(axes) != 1 or len(node.inputs) != 2 - bool(match["scalar"]):
        return None
    (order,) = axes
    operands = []
    for value in node.inputs:
        if value.array is not None:
            shape = (1,) * (len(order) - value.array.ndim) + value.array.shape
            turned = [order.index(axis) for axis in _ORDER if axis in order]
            value = replace(value, array=value.array.reshape(shape).transpose(turned))
        operands.append(value)
    if match["scalar"]:
        operands.append(_number(node.text("scalar", "1")))
    if match["reverse"]:
        operands.reverse()
    return node.add(_KINDS[match["kind"]], *operands, order=order)


_KINDS = {"addn": "Add", "add": "Add", "plus": "Add", "sub": "Sub", "minus": "Sub", "mul": "Mul"}
_KINDS |= {"div": "Div"}
_ARITHMETIC = re.compile(
    rf"(?:elemwise|broadcast)?(?P<reverse>r?)(?P<kind>{'|'.join(_KINDS)})(?P<scalar>scalar)?"
)
_RENAMED = {"relu": "Relu", "sigmoid": "Sigmoid", "logisticregressionoutput": "Sigmoid"}
_RENAMED |= {"negative": "Neg", "log": "Log", "exp": "Exp"}
_RENAMED |= {"argmax": "ArgMax", "argmaxchannel": "ArgMax", "topk": "TopK"}
_RULES: dict[str, Callable[[Node], _Values]] = {
    **dict.fromkeys((*_RENAMED, "activation"), _rename),
    **dict.fromkeys(("identity", "copy", "blockgrad", "dropout", "cast", "ampcast"), _pass),
    **dict.fromkeys(("ampmulticast", "crossdevicecopy"), _pass),
    **dict.fromkeys(("batchnorm", "batchnormaddrelu", "contribsyncbatchnorm"), _normalise),
    **dict.fromkeys(("flatten", "reshape"), _reshape),
    **dict.fromkeys(("softmax", "logsoftmax"), _softmax),
    **dict.fromkeys(("softmaxoutput", "softmaxactivation"), _softmax_of_training),
    **dict.fromkeys(("sliceaxis", "reverse"), _slice),
    **dict.fromkeys(("imagetotensor", "imagenormalize"), _prepare),
    "transpose": _transpose,
    "convolution": _convolve,
    "pooling": _pool,
    "fullyconnected": _connect,
    "take": _take,
}
"""What translates an operator, by `Node.kind`; `_combine` translates others."""
