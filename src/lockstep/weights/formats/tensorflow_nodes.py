"""A graph of TensorFlow in the terms of `network`: ONNX's operators, NCHW, kernels OIHW.

What changes no value in inference is left out (Identity, Cast, reading a variable). Conv2D becomes
one node with a BiasAdd after it and a Pad before it, and so do groups and batch norms in parts
(`tensorflow_merging`). All that comes before the arithmetic with mean and standard deviation, such
as a resize, is left out too. Operators that are not listed here keep their names, so that a network
that needs one is refused.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.weights.formats.tensorflow_graph import FLOATS, FlatGraph, Node
from lockstep.weights.formats.tensorflow_merging import merge_groups, merge_norms
from lockstep.weights.formats.tensorflow_values import (
    CONSTANTS,
    RESHAPES,
    SAME,
    Values,
    get_flag,
    get_list,
    get_text,
)

_ADDITIONS = ("Add", "AddV2", "BiasAdd")
_ARITHMETIC = {"Sub": "Sub", "RealDiv": "Div", "Div": "Div", "Mul": "Mul"}
_ARITHMETIC |= dict.fromkeys(_ADDITIONS, "Add")
_POOLS = ("Mean", "AvgPool")
_INPUTS = ("Placeholder", "PlaceholderWithDefault")
_TO_NCHW = [0, 3, 1, 2]
_TO_NHWC = [0, 2, 3, 1]
_KERNEL = "#kernel"
_MATRIX = "#matrix"
_TURNED = "#turned"
_FLAT = "#flat"
"""Endings of the names of constants that are laid out as ONNX has them."""
_COLOURS = 3


@dataclass
class Operator:
    """A node in ONNX's terms."""

    op_type: str
    input: list[str]
    output: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)


class Nodes:
    """The part of a graph between its images and its results. Raises `ValueError` if it has no
    single first convolution."""

    def __init__(self, graph: FlatGraph, *, from_anywhere: bool) -> None:
        """`from_anywhere` allows that images are prepared by other operators before mean and
        standard deviation."""
        self._graph = graph
        self._values = Values(graph)
        self._nearest: dict[str, Node | None] = {}
        nodes = graph.nodes
        if graph.outputs:
            nodes = self._values.list_nodes_behind(graph.outputs)
        kept = merge_groups(self._values, [node for node in nodes if node.op not in SAME])
        convs = [node for node in kept if node.op == "Conv2D"]
        self._layout = _find_layout(convs)
        kept = merge_norms(self._values, kept, self._layout)
        self._stem = self._find_stem(convs)
        start = self._find_start()
        origin = self._values.find_maker(start)
        if not from_anywhere and (origin is None or origin.op not in _INPUTS):
            kind = "nothing" if origin is None else origin.op
            raise ValueError(
                f"its images are prepared by {kind} ({start!r:.80}); expected the graph's input,"
                " and after it only arithmetic with mean and standard deviation"
            )
        self._uses = Counter[str]()
        for node in kept:
            self._uses.update(set(map(self._values.source, node.inputs)))
        before = {node.name for node in self._values.list_nodes_behind((start,))}
        self.inputs = (start,)
        self.nodes = tuple(self._translate([node for node in kept if node.name not in before]))
        self.users: dict[str, list[Operator]] = {}
        for operator in self.nodes:
            for value in dict.fromkeys(operator.input):
                self.users.setdefault(value, []).append(operator)

    # What `network.Graph` needs

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of an operator's attribute."""
        return node.attributes.get(name, default)

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant; None if it is computed from images. Raises `ValueError` if its bytes
        do not fit."""
        value, mark, layout = name.partition("#")
        values = self._values.evaluate(value)
        if values is None or not layout:
            return values
        ending = mark + layout
        if values.ndim == 4 and ending == _KERNEL:
            return values.transpose(3, 2, 0, 1)
        if values.ndim == 4 and values.shape[:2] == (1, 1) and ending == _MATRIX:
            return values[0, 0]
        if values.ndim == 2 and ending in (_MATRIX, _TURNED):
            return values.T if ending == _TURNED else values
        if ending == _FLAT:
            return values.reshape(-1)
        raise ValueError(
            f"{value!r:.80} has the shape {list(values.shape)}, which is not that of a {layout}"
        )

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""
        values = self.constant(name)
        if values is None:
            raise ValueError(f"{what} ({name!r:.80}) is not a constant")
        if values.dtype.kind != "f":
            raise ValueError(
                f"{what} ({name!r:.80}) is {values.dtype}, expected floats; export without"
                " quantization"
            )
        return np.array(values, np.float32, order="C")

    def place(self, name: str) -> tuple[str | None, Any]:
        """Return the name under which a constant is stored, None if it is none, and its type in
        TensorFlow's numbers."""
        node = self._values.find_constant(name.partition("#")[0])
        if node is None:
            return None, 0
        return self._graph.place(node), self._graph.dtype(node)

    def list_halves(self) -> list[str]:
        """Return the stored names of used constants that are not float32."""
        halves: dict[str, None] = {}
        for operator in self.nodes:
            for value in operator.input:
                name, dtype = self.place(value)
                if name is not None and dtype in FLOATS[1:]:
                    halves[name] = None
        return list(halves)

    # Convolutions

    def _find_conv_before(self, value: str) -> Node | None:
        """Return the convolution that a value comes from, along the first inputs that are not
        constants."""
        path: list[str] = []
        conv: Node | None = None
        value = self._values.source(value)
        while value not in self._nearest and len(path) <= len(self._graph.nodes):
            path.append(value)
            node = self._values.find_maker(value)
            if node is not None and node.op == "Conv2D":
                conv = node
                break
            others = self._values.list_computed(node)
            if not others:
                break
            value = self._values.source(others[0])
        conv = self._nearest.get(value, conv)
        self._nearest |= dict.fromkeys(path, conv)
        return conv

    def _find_stem(self, convs: list[Node]) -> Node:
        """Return the only convolution of images."""
        whole = [conv for conv in convs if len(conv.inputs) == 2]
        stems = [conv for conv in whole if self._find_conv_before(conv.inputs[0]) is None]
        if len(stems) != 1:
            names = ", ".join(node.name[:80] for node in stems[:3]) or "none"
            raise ValueError(
                f"it has {len(stems)} convolutions of its images ({names}), expected one"
            )
        return stems[0]

    def _count_groups(self, conv: Node) -> int:
        """Return the number of groups: TensorFlow's kernel has the inputs of one group."""
        before = self._find_conv_before(conv.inputs[0])
        inputs = _COLOURS if before is None else self._values.read_kernel_shape(before)[3]
        return inputs // max(self._values.read_kernel_shape(conv)[2], 1)

    def _find_start(self) -> str:
        """Return the value that mean and standard deviation are applied to, or else the stem's
        images."""
        value = self._values.source(self._read_padding(self._stem)[0])
        for _ in range(16):
            node = self._values.find_maker(value)
            computed = self._values.list_computed(node)
            if node is None or node.op not in (*_ARITHMETIC, "Transpose") or len(computed) != 1:
                break
            if node.op == "Transpose" and self._read_permutation(node) != _TO_NCHW:
                break
            value = self._values.source(computed[0])
        return value

    # Operators

    def _translate(self, nodes: list[Node]) -> Iterator[Operator]:
        """Yield the operators of nodes. An addition to a convolution is its bias."""
        biases: set[str] = set()
        padded = Counter[str]()
        followers: dict[str, Node] = {}
        for node in nodes:
            followers |= dict.fromkeys(map(self._values.source, node.inputs), node)
            if node.op in ("Conv2D", "MaxPool") and self._read_padding(node)[1] != [0] * 4:
                padded[self._values.source(node.inputs[0])] += 1
        for node in nodes:
            if node.op == "Conv2D" and len(node.inputs) == 2 and not self._is_head(node):
                bias = followers.get(node.output)
                if bias is None or self._uses[node.output] != 1 or not self._is_bias(bias):
                    bias = None
                else:
                    biases.add(bias.name)
                yield from self._translate_convolution(node, bias)
        for node in nodes:
            is_merged = node.name in biases
            if node.op == "Pad":
                is_merged |= padded[node.output] == self._uses[node.output]
            if self._is_head(node):
                value, kernel = map(self._values.source, node.inputs)
                yield Operator("MatMul", [value, kernel + _MATRIX], [node.output])
            elif node.op not in ("Conv2D", *CONSTANTS) and not is_merged:
                yield self._translate_node(node)

    def _translate_convolution(self, node: Node, bias: Node | None) -> Iterator[Operator]:
        value, pads = self._read_padding(node)
        if node is self._stem and self._layout == "NHWC":
            maker = self._values.find_maker(value)
            is_transpose = maker is not None and maker.op == "Transpose"
            if maker is not None and is_transpose and self._read_permutation(maker) == _TO_NHWC:
                value = self._values.source(maker.inputs[0])
            else:
                yield Operator("Transpose", [value], [f"{value}#nchw"], {"perm": _TO_NCHW})
                value = f"{value}#nchw"
        inputs = [value, self._values.source(node.inputs[1]) + _KERNEL]
        output = node.output
        if bias is not None:
            inputs.append(self._find_other_term(bias, node.output) + _FLAT)
            output = bias.output
        attributes = self._translate_window(node, pads) | {"group": self._count_groups(node)}
        yield Operator("Conv", inputs, [output], attributes)

    def _translate_node(self, node: Node) -> Operator:
        inputs = list(map(self._values.source, node.inputs))
        output = [node.output]
        count = len(inputs)
        if get_text(node, "data_format", "NHWC") == self._layout:
            images = self._translate_image_node(node, inputs)
            if images is not None:
                return images
        if node.op == "Mean" and count == 2:
            places = _TO_NHWC if self._layout == "NHWC" else range(4)
            axes = self._values.read_integers(inputs[1], 4)
            attributes = {"axes": [places[axis] for axis in axes if -4 <= axis < 4]}
            return Operator("ReduceMean", inputs[:1], output, attributes)
        if node.op == "MatMul" and count == 2 and not get_flag(node, "transpose_a", False):
            layout = _TURNED if get_flag(node, "transpose_b", False) else _MATRIX
            return Operator("MatMul", [inputs[0], inputs[1] + layout], output)
        if node.op == "Transpose" and count == 2:
            return Operator("Transpose", inputs[:1], output, {"perm": self._read_permutation(node)})
        if node.op in RESHAPES and inputs:
            return Operator("Reshape", inputs[:1], output)
        if node.op in ("Relu", "Shape") and count == 1:
            return Operator(node.op, inputs, output)
        kind = _ARITHMETIC.get(node.op) if count == 2 else None
        return Operator(kind or f"TensorFlow's {node.op}", inputs, output)

    def _translate_image_node(self, node: Node, inputs: list[str]) -> Operator | None:
        """Return the operator of a node whose images have the graph's layout; None if their layout
        has no meaning for it."""
        is_inference = not get_flag(node, "is_training", True)
        if node.op.startswith("FusedBatchNorm") and len(inputs) == 5 and is_inference:
            epsilon = node.attributes["epsilon"].f if "epsilon" in node.attributes else 1e-4
            norm = [inputs[0], *(f"{value}{_FLAT}" for value in inputs[1:])]
            return Operator("BatchNormalization", norm, [node.output], {"epsilon": epsilon})
        attributes = {"kernel_shape": self._take_spatial(get_list(node, "ksize"))}
        if node.op == "MaxPool" and len(inputs) == 1:
            value, pads = self._read_padding(node)
            attributes |= self._translate_window(node, pads)
            return Operator("MaxPool", [value], [node.output], attributes)
        if node.op == "AvgPool" and len(inputs) == 1:
            return Operator("AveragePool", inputs, [node.output], attributes)
        return None

    def _read_permutation(self, node: Node) -> list[int]:
        if len(node.inputs) != 2:
            return []
        return self._values.read_integers(node.inputs[1], 4)

    def _find_other_term(self, addition: Node, value: str) -> str:
        """Return the second term of an addition."""
        for term in map(self._values.source, addition.inputs):
            if term != value:
                return term
        return value

    def _is_bias(self, node: Node) -> bool:
        """Return whether a node adds a constant with one number for each channel."""
        constants = [value for value in node.inputs if self._values.find_constant(value)]
        if node.op not in _ADDITIONS or len(node.inputs) != 2 or len(constants) != 1:
            return False
        if node.op == "BiasAdd":
            return get_text(node, "data_format", "NHWC") == self._layout
        maker = self._values.find_maker(constants[0])
        if maker is not None and maker.op == "Reshape" and len(maker.inputs) == 2:
            shape = self._values.read_integers(maker.inputs[1], 4)
        elif maker is not None and maker.op in CONSTANTS:
            shape = list(self._graph.shape(maker))
        else:
            return False
        channel = -1 if self._layout == "NHWC" else -3
        if len(shape) < -channel:
            return False
        del shape[channel]
        return set(shape) <= {1}

    def _is_head(self, conv: Node) -> bool:
        """Return whether a node is a convolution that is the classifier: what it multiplies is an
        average over the images."""
        if conv.op != "Conv2D" or len(conv.inputs) != 2:
            return False
        node = self._values.find_maker(conv.inputs[0])
        for _ in range(4):
            if node is None or node.op not in RESHAPES:
                break
            node = self._values.find_maker(node.inputs[0])
        return node is not None and node.op in _POOLS

    def _read_padding(self, node: Node) -> tuple[str, list[int]]:
        """Return the images of a window before a Pad, and the sizes that this pads: top, left,
        bottom, right."""
        value = self._values.source(node.inputs[0])
        pad = self._values.find_maker(value)
        if pad is None or pad.op != "Pad" or len(pad.inputs) != 2:
            return value, [0] * 4
        if get_text(node, "padding", "") != "VALID":
            return value, [0] * 4
        sizes = self._values.read_integers(pad.inputs[1], 8)
        if len(sizes) != 8:
            return value, [0] * 4
        begins = self._take_spatial(sizes[::2])
        ends = self._take_spatial(sizes[1::2])
        if sum(map(abs, sizes)) != sum(map(abs, [*begins, *ends])):
            return value, [0] * 4  # other axes than height and width are padded
        return self._values.source(pad.inputs[0]), [*begins, *ends]

    def _translate_window(self, node: Node, pads: list[int]) -> dict[str, Any]:
        """Return the attributes of a window that ONNX has."""
        kind = get_text(node, "padding", "")
        explicit = get_list(node, "explicit_paddings")
        if kind == "EXPLICIT" and len(explicit) == 8:
            pads = [*self._take_spatial(explicit[::2]), *self._take_spatial(explicit[1::2])]
            kind = "VALID"
        dilations = get_list(node, "dilations") or [1] * 4
        return {
            "auto_pad": b"SAME_UPPER" if kind == "SAME" else kind.encode(),
            "pads": pads,
            "strides": self._take_spatial(get_list(node, "strides")),
            "dilations": self._take_spatial(dilations),
        }

    def _take_spatial(self, values: list[int]) -> list[int]:
        """Return the numbers of height and width of a list for four axes."""
        if len(values) != 4:
            return []
        return values[1:3] if self._layout == "NHWC" else values[2:]


def _find_layout(convs: list[Node]) -> str:
    """Return NHWC or NCHW."""
    layouts = sorted({get_text(node, "data_format", "NHWC") for node in convs})
    if layouts not in (["NHWC"], ["NCHW"]):
        raise ValueError(
            f"its convolutions have the layouts {layouts!s:.80}, expected all NHWC or all NCHW"
        )
    return layouts[0]
