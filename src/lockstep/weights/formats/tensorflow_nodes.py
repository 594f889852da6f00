"""A graph of TensorFlow in the terms of `network`: ONNX's operators, NCHW, kernels OIHW.

Every node between the images and the outputs becomes an operator of ONNX, or keeps its own name, so
that a network with it is refused. Nodes that change no value in inference are left out
(`tensorflow_values.is_same`). Several nodes become one operator where ONNX has one:

- a convolution and the addition of its bias;
- a batch norm in the parts of `tf.nn.batch_normalization`, as Keras 3 exports it;
- the convolutions of the groups of a Split, and their Concat.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from lockstep.weights.formats.protobuf import read_sizes
from lockstep.weights.formats.resnet_graph import Graph, Operator
from lockstep.weights.formats.tensorflow_graph import FLOATS, FlatGraph, Node
from lockstep.weights.formats.tensorflow_values import Values, get_attribute, get_type, is_same

_ARITHMETIC = ("Sub", "Mul", "Div", "Neg", "Log", "Exp", "Relu", "Softmax", "LogSoftmax", "Sigmoid")
_OPERATORS = {name: name for name in (*_ARITHMETIC, "Shape", "ArgMax", "TopK")}
_OPERATORS |= {"RealDiv": "Div", "TopKV2": "TopK"}
"""ONNX's names of operators that compute the same of the same inputs."""
_WINDOWS = ("Conv", "Pad", "MaxPool")
"""Operators that return images in the order NCHW."""
_INPUTS = ("Placeholder", "PlaceholderWithDefault")
_NO_IMAGES = (7, 10)
"""TensorFlow's numbers of the types of texts and truth values."""
_TO_NCHW = [0, 3, 1, 2]
_TO_NHWC = [0, 2, 3, 1]
_LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": np.asarray,
    "#kernel": lambda array: array.transpose(3, 2, 0, 1),
    "#turned": np.transpose,
    "#channels": lambda array: array.reshape(-1, 1, 1),
    "#flat": np.ravel,
}
"""How constants are laid out for ONNX, by the ending that their names have then."""
_LAST_AXES = (-1, 3)
_CHANNEL = "TensorFlow's StridedSlice"
"""One channel, whose axis is taken away."""
_END = 2**31 - 1
"""The end of an axis of any size."""


class Nodes:
    """The nodes between the images of a graph and its outputs, as operators of ONNX."""

    def __init__(self, graph: FlatGraph, *, from_anywhere: bool) -> None:
        """`from_anywhere` allows that other operators resize and crop the images, up to a node
        EnsureShape."""
        self.values = Values(graph)
        self.halves: dict[str, None] = {}
        """The stored names of used constants that are not float32."""
        self._graph = graph
        self._operators: dict[str, Operator] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._places: dict[str, str] = {}
        order = self.values.sort_nodes(graph.outputs)
        images = [node for node in order if node.op in _INPUTS]
        images = [node for node in images if get_type(node, "dtype") not in _NO_IMAGES]
        self.squares = [node for node in order if from_anywhere and node.op == "EnsureShape"]
        """The nodes that the images come out of, resized and cropped."""
        self.images = images
        starts = self.squares or images
        inputs = [self.values.source(node.output) for node in starts]
        name = self.values.name_maker
        self._computed = {node.name for node in starts} | set(map(name, inputs))
        path = []
        for node in order:
            if not self._computed.isdisjoint(map(name, node.inputs)):
                self._computed.add(node.name)
                path.append(node)
        results = [value for value in graph.outputs if name(value) in self._computed]
        outputs = list(map(self.values.source, results))
        self._uses = Counter(outputs)
        for node in path:
            self._uses.update(set(map(self.values.source, node.inputs)))
        self._branching = {name(value) for value in self._uses if not value.endswith(":0")}
        """Names of nodes that have more than their first output used."""
        layouts = [_read_layout(node) for node in path if node.op == "Conv2D"]
        self._layout = layouts[0] if layouts else "NHWC"
        self._channel = -1 if self._layout == "NHWC" else -3
        self._raw = set(inputs)
        """Images before the first window."""
        self._widths = dict.fromkeys(inputs, 3)
        """The number of channels of each value."""
        for node in path:
            if not is_same(node):
                self._add(node)
        self.rounds = any(get_type(node, "DstT") in FLOATS[2:] for node in path) or bool(
            self.halves
        )
        """Whether it computes in half precision, or with constants of it."""
        self.unused = list(_list_unused(graph, self.values.sort_nodes(results)))
        """Nodes that no output is computed from, apart from those of other signatures."""
        self.operators = Graph(
            list(self._operators.values()),
            inputs,
            outputs,
            self._constants,
            self._places,
            channels_last=self._layout == "NHWC",
            takes_bytes=any(get_type(node, "dtype") not in FLOATS for node in images),
            sizes=_list_sizes(images),
        )

    def _add(self, node: Node) -> None:
        """Add the operator of a node. Its images have the channels of its first input."""
        inputs = list(map(self.values.source, node.inputs))
        translate = self._TRANSLATIONS.get(node.op)
        operator = translate(self, node, inputs) if translate else None
        if node.op in _OPERATORS:
            outputs = [node.output, f"{node.name}:1"]  # TopK has two
            operator = Operator(_OPERATORS[node.op], list(map(self._take, inputs)), outputs)
        elif operator is None or node.name in self._branching:
            operator = Operator(f"TensorFlow's {node.op}", inputs, [node.output])
        self._operators[node.output] = operator
        widths = [self._widths[value] for value in inputs if value in self._widths]
        self._widths.setdefault(node.output, max(widths, default=0))
        if operator.op_type not in _WINDOWS and not self._raw.isdisjoint(inputs):
            self._raw.add(node.output)

    def _take(self, value: str, layout: str = "") -> str:
        """Return the name of an input. If it is a constant, it is noted in a layout for ONNX."""
        is_computed = self.values.name_maker(value) in self._computed
        array = None if is_computed else self.values.evaluate(value)
        if array is None:
            return value
        name = value + layout
        self._constants[name] = _LAYOUTS[layout](array)
        node = self.values.find_constant(value)
        if node is not None:
            self._places[name] = str(self._graph.place(node))
            if self._graph.dtype(node) in FLOATS[1:]:
                self.halves[self._places[name]] = None
        return name

    def _is_by_channel(self, name: str) -> bool:
        """Return whether a constant has one number, or one for each channel."""
        array = self._constants.get(name)
        if array is None:
            return False
        axes = [axis - array.ndim for axis, size in enumerate(array.shape) if size != 1]
        return axes in ([], [self._channel])

    # Windows

    def _turn(self, value: str) -> str:
        """Return images as NCHW."""
        if self._layout == "NCHW" or value not in self._raw:
            return value
        before = self._operators.get(value)
        if before and before.attributes.get("perm") == _TO_NHWC and self._uses[value] == 1:
            del self._operators[value]
            return before.input[0]
        turned = f"{value}#nchw"
        self._operators[turned] = Operator("Transpose", [value], [turned], {"perm": _TO_NCHW})
        return turned

    def _translate_convolution(self, node: Node, inputs: list[str]) -> Operator | None:
        kernel = self.values.evaluate(inputs[1])
        if kernel is None or kernel.ndim != 4 or _read_layout(node) != self._layout:
            return None
        # A kernel of TensorFlow has the inputs of one group.
        groups = self._widths.get(inputs[0], 3) // max(kernel.shape[2], 1)
        self._widths[node.output] = kernel.shape[3]
        names = [self._turn(inputs[0]), self._take(inputs[1], "#kernel")]
        attributes = self._read_window(node) | {"group": groups}
        return Operator("Conv", names, [node.output], attributes)

    def _translate_pad(self, node: Node, inputs: list[str]) -> Operator | None:
        sizes = self.values.evaluate(inputs[1])
        number = self.values.evaluate(inputs[2]) if len(inputs) > 2 else np.zeros(1)
        if sizes is None or number is None or sizes.shape != (4, 2):
            return None
        order = _TO_NCHW if self._layout == "NHWC" else range(4)
        attributes = {"pads": sizes[list(order)].T.ravel().tolist(), "value": number.item()}
        return Operator("Pad", [self._turn(inputs[0])], [node.output], attributes)

    def _translate_pool(self, node: Node, inputs: list[str]) -> Operator | None:
        attributes = self._read_window(node)
        attributes["kernel_shape"] = self._take_spatial(get_attribute(node, "ksize", []))
        kind = "MaxPool" if node.op == "MaxPool" else "AveragePool"
        is_whole = kind == "MaxPool" or attributes["auto_pad"] == b"VALID"
        is_known = is_whole and _read_layout(node) == self._layout
        return Operator(kind, inputs, [node.output], attributes) if is_known else None

    def _translate_mean(self, node: Node, inputs: list[str]) -> Operator | None:
        places = _TO_NHWC if self._layout == "NHWC" else range(4)
        axes = [places[axis] for axis in self.values.read_integers(inputs[1]) if -4 <= axis < 4]
        attributes = {"axes": axes, "keepdims": int(get_attribute(node, "keep_dims", False))}
        return Operator("ReduceMean", inputs[:1], [node.output], attributes)

    def _translate_norm(self, node: Node, inputs: list[str]) -> Operator | None:
        if _read_layout(node) != self._layout or get_attribute(node, "is_training", True):
            return None
        epsilon = node.attributes["epsilon"].f if "epsilon" in node.attributes else 1e-4
        names = list(map(self._take, inputs))
        return Operator("BatchNormalization", names, [node.output], {"epsilon": epsilon})

    def _read_window(self, node: Node) -> dict[str, Any]:
        """Return the attributes of a window that ONNX has."""
        kind = get_attribute(node, "padding", "")
        pads = [0] * 4
        explicit = get_attribute(node, "explicit_paddings", [])
        if kind == "EXPLICIT" and len(explicit) == 8:
            pads = [*self._take_spatial(explicit[::2]), *self._take_spatial(explicit[1::2])]
            kind = "VALID"
        return {
            "auto_pad": b"SAME_UPPER" if kind == "SAME" else kind.encode(),
            "pads": pads,
            "strides": self._take_spatial(get_attribute(node, "strides", [])),
            "dilations": self._take_spatial(get_attribute(node, "dilations", []) or [1] * 4),
        }

    def _take_spatial(self, values: list[int]) -> list[int]:
        """Return the numbers of height and width of a list for four axes."""
        if len(values) != 4:
            return []
        return values[1:3] if self._layout == "NHWC" else values[2:]

    # Several nodes in one

    def _translate_sum(self, node: Node, inputs: list[str]) -> Operator | None:
        if len(inputs) != 2:
            return None
        is_turned = node.op == "BiasAdd" and _read_layout(node) == "NCHW"
        names = [self._take(inputs[0]), self._take(inputs[1], "#channels" if is_turned else "")]
        joint = self._join_norm(*inputs) or self._join_bias(inputs[0], inputs[1], names[1])
        joint = joint or self._join_bias(inputs[1], inputs[0], names[0])
        return replace(joint or Operator("Add", names, []), output=[node.output])

    def _join_bias(self, value: str, term: str, name: str) -> Operator | None:
        """Return a convolution and the addition of its bias; None if these are something else."""
        conv = self._operators.get(value)
        if conv is None or conv.op_type != "Conv" or len(conv.input) > 2:
            return None
        if self._uses[value] != 1 or not self._is_by_channel(name):
            return None
        del self._operators[value]
        return replace(conv, input=[*conv.input, self._take(term, "#flat")])

    def _join_norm(self, product: str, shift: str) -> Operator | None:
        """Return the batch norm that a sum is: x * f + (beta - mean * f), where f is
        rsqrt(variance + epsilon) * gamma; None if it is something else."""
        try:
            value, factor = self._take_apart(product, "Mul")
            beta, shrunk = self._take_apart(shift, "Sub")
            mean, same_factor = self._take_apart(shrunk, "Mul")
            root, gamma = self._take_apart(factor, "Mul")
            [total] = self._take_apart(root, "Rsqrt")
            variance, number = self._take_apart(total, "Add", "AddV2")
        except ValueError:
            return None
        epsilon = self.values.evaluate(number)
        constants = [self._take(name) for name in (gamma, beta, mean, variance)]
        is_norm = factor == same_factor and self._uses[product] == 1
        if not is_norm or epsilon is None or not all(map(self._is_by_channel, constants)):
            return None
        del self._operators[product]
        constants = [self._take(name, "#flat") for name in constants]
        attributes = {"epsilon": epsilon.item()}
        return Operator("BatchNormalization", [value, *constants], [], attributes)

    def _take_apart(self, value: str, *ops: str) -> list[str]:
        """Return the inputs of the node that makes a value. Raises `ValueError` if it is another
        operator's."""
        maker = self.values.find_maker(value)
        if maker is None or maker.op not in ops:
            raise ValueError(f"{value!r:.80} is not made by {ops}")
        return list(map(self.values.source, maker.inputs))

    def _join_groups(self, node: Node, inputs: list[str]) -> Operator | None:
        """Return one convolution in place of those of the parts of a Split, and their Concat; None
        if the node is another Concat."""
        *values, axis = inputs
        convs = [self._operators[value] for value in values if value in self._operators]
        split = self.values.find_maker(convs[0].input[0]) if convs else None
        if split is None or split.op != "Split" or len(convs) != len(values):
            return None
        parts = [f"{split.name}:{number}" for number in range(len(convs))]
        axes = self.values.read_integers(split.inputs[0]) + self.values.read_integers(axis)
        is_group = (
            get_attribute(split, "num_split", 0) == len(parts)
            and [axis % 4 for axis in axes] == [self._channel % 4] * 2
            and all(self._uses[value] == 1 for value in (*values, *parts))
        )
        for conv, part in zip(convs, parts, strict=True):
            is_group &= (conv.op_type, len(conv.input), conv.input[0]) == ("Conv", 2, part)
            is_group &= conv.attributes | {"group": 0} == convs[0].attributes | {"group": 0}
        if not is_group:
            return None
        for value in (split.output, *values):
            del self._operators[value]
        images = self.values.source(split.inputs[1])
        kernels = [conv.input[1] for conv in convs]
        whole = f"{node.output}#kernel"
        kernel = np.concatenate([self._constants[name] for name in kernels])
        self._constants[whole] = kernel
        if kernels[0] in self._places:
            self._places[whole] = self._places[kernels[0]]
        self._widths[node.output] = len(kernel)
        groups = self._widths.get(images, 3) // max(kernel.shape[1], 1)
        attributes = convs[0].attributes | {"group": groups}
        return Operator("Conv", [images, whole], [node.output], attributes)

    # Parts and orders of axes

    def _translate_slice(self, node: Node, inputs: list[str]) -> Operator | None:
        """Return a slice with one entry for each axis that is named."""
        numbers = [self.values.read_integers(value) for value in inputs[1:]]
        rows: list[tuple[int, int, int, int]] = []
        shrunk = 0
        if not all(numbers):
            return None
        if node.op == "ReverseV2":
            rows = [(axis, _END, -_END, -1) for axis in numbers[0]]
        elif node.op == "Slice":
            for axis, (begin, size) in enumerate(zip(*numbers, strict=True)):
                rows.append((axis, begin, _END if size < 0 else begin + size, 1))
        else:
            masks = ("begin", "end", "ellipsis", "shrink_axis", "new_axis")
            begins, ends, ellipsis, shrunk, added = (
                get_attribute(node, f"{m}_mask", 0) for m in masks
            )
            first = 0
            for place, (begin, end, step) in enumerate(zip(*numbers, strict=True)):
                if ellipsis & 1 << place:
                    first = -len(numbers[0])
                    continue
                if begins & ~shrunk & 1 << place:
                    begin = 0 if step > 0 else _END
                if ends & ~shrunk & 1 << place:
                    end = _END if step > 0 else -_END
                rows.append((first + place, begin, end, step))
            if added or (shrunk and shrunk != 1 << len(numbers[0]) - 1):
                return None
        rows = [row for row in rows if row[1:] != (0, _END, 1)]
        if shrunk:
            if len(rows) != 1 or rows[0][0] not in _LAST_AXES:
                return None
            return Operator(_CHANNEL, inputs[:1], [node.output], {"channel": rows[0][1]})
        names = ("axes", "starts", "ends", "steps")
        attributes = {name: [row[i] for row in rows] for i, name in enumerate(names)}
        return Operator("Slice", inputs[:1], [node.output], attributes)

    def _join_channels(self, node: Node, inputs: list[str]) -> Operator | None:
        """Return a Gather in place of a stack of single channels; None if it is another stack."""
        parts = [self._operators.get(value) for value in inputs]
        chosen = [part for part in parts if part is not None and part.op_type == _CHANNEL]
        values = {part.input[0] for part in chosen}
        axis = get_attribute(node, "axis", 0)
        is_whole = len(chosen) == len(parts) and len(values) == 1 and axis in _LAST_AXES
        if not is_whole or any(self._uses[value] != 1 for value in inputs):
            return None
        for value in inputs:
            self._operators.pop(value, None)
        name = f"{node.output}#channels"
        self._constants[name] = np.array([part.attributes["channel"] for part in chosen])
        return Operator("Gather", [values.pop(), name], [node.output], {"axis": axis})

    def _translate_gather(self, node: Node, inputs: list[str]) -> Operator | None:
        axes = self.values.read_integers(inputs[2]) if len(inputs) == 3 else []
        if len(axes) != 1 or get_attribute(node, "batch_dims", 0):
            return None
        names = list(map(self._take, inputs[:2]))
        return Operator("Gather", names, [node.output], {"axis": axes[0]})

    def _translate_transpose(self, node: Node, inputs: list[str]) -> Operator:
        order = self.values.read_integers(inputs[1])
        return Operator("Transpose", inputs[:1], [node.output], {"perm": order})

    def _translate_cast(self, node: Node, inputs: list[str]) -> Operator | None:
        is_float = get_type(node, "DstT") in FLOATS
        return Operator("Cast", inputs, [node.output], {"to": 1}) if is_float else None

    def _translate_squeeze(self, node: Node, inputs: list[str]) -> Operator:
        axes = get_attribute(node, "squeeze_dims", [])
        return Operator("Squeeze", inputs, [node.output], {"axes": axes} if axes else {})

    def _translate_reshape(self, node: Node, inputs: list[str]) -> Operator | None:
        """Return a reshape to a shape that is constant, apart from the number of images."""
        shape = self.values.read_integers(inputs[1])
        pack = self.values.find_maker(inputs[1])
        if not shape and pack is not None and pack.op == "Pack":
            sizes = list(map(self.values.read_integers, pack.inputs))
            if self._is_batch_size(pack.inputs[0]):
                sizes[0] = [-1]
            shape = list(np.ravel(sizes)) if all(len(size) == 1 for size in sizes) else []
        if not shape:
            return None
        name = f"{node.output}#shape"
        self._constants[name] = np.array(shape)
        return Operator("Reshape", [inputs[0], name], [node.output])

    def _is_batch_size(self, value: str) -> bool:
        """Return whether a value is the first number of a shape."""
        part = self.values.find_maker(value)
        if part is None or part.op != "StridedSlice" or get_attribute(part, "end_mask", 0):
            return False
        shape = self.values.find_maker(part.inputs[0])
        bounds = list(map(self.values.read_integers, part.inputs[1:3]))
        return shape is not None and shape.op == "Shape" and bounds == [[0], [1]]

    def _translate_product(self, node: Node, inputs: list[str]) -> Operator | None:
        if get_attribute(node, "transpose_a", False):
            return None
        layout = "#turned" if get_attribute(node, "transpose_b", False) else ""
        names = [self._take(inputs[0]), self._take(inputs[1], layout)]
        return Operator("MatMul", names, [node.output])

    _TRANSLATIONS: ClassVar[dict[str, Callable[..., Operator | None]]] = {
        **dict.fromkeys(("Add", "AddV2", "AddN", "BiasAdd"), _translate_sum),
        **dict.fromkeys(("ReverseV2", "Slice", "StridedSlice"), _translate_slice),
        **dict.fromkeys(("MaxPool", "AvgPool"), _translate_pool),
        **dict.fromkeys(("Pad", "PadV2"), _translate_pad),
        **dict.fromkeys(
            ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _translate_norm
        ),
        "Conv2D": _translate_convolution,
        "ConcatV2": _join_groups,
        "GatherV2": _translate_gather,
        "MatMul": _translate_product,
        "Cast": _translate_cast,
        "Mean": _translate_mean,
        "Pack": _join_channels,
        "Reshape": _translate_reshape,
        "Squeeze": _translate_squeeze,
        "Transpose": _translate_transpose,
    }
    """What other operators become; None: nothing that a ResNet has."""


def _read_layout(node: Node) -> str:
    """Return NHWC or NCHW."""
    return str(get_attribute(node, "data_format", "NHWC"))


def _list_sizes(images: Iterable[Node]) -> list[int]:
    """Return the sizes of images without the number of images; those that are not fixed are below
    0."""
    shapes = [read_sizes(n.attributes["shape"].shape) for n in images if "shape" in n.attributes]
    return [size for shape in shapes for size in shape[1:]]


def _list_unused(graph: FlatGraph, used: Iterable[Node]) -> Iterator[Node]:
    """Yield the other nodes of a graph and of the functions that it calls."""
    names = {node.name for node in used}
    calls = {name.rpartition("//")[0] for name in names} | {""}
    for node in graph.nodes:
        is_input = node.op in _INPUTS or "Variable" in node.op
        if node.name not in names and node.name.rpartition("//")[0] in calls and not is_input:
            yield node
