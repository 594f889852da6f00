"""A graph of TensorFlow in the terms of `network`: ONNX's operators, NCHW, kernels OIHW.

What changes no value in inference is left out (Identity, Cast, reading a variable). These become
one node:

- Conv2D with a BiasAdd after it, and Pad before it
- the convolutions of the groups of a grouped convolution, between Split and Concat
- a batch norm in the parts of `tf.nn.batch_normalization`, as Keras 3 exports it

All that comes before the arithmetic with mean and standard deviation, such as a resize, is left out
too. Operators that are not listed here keep their names, so that a network that needs one is
refused.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.weights.formats.tensorflow_graph import FLOATS, FlatGraph, Node, message

_SAME = (
    *(
        "Identity",
        "Cast",
        "EnsureShape",
        "StopGradient",
        "PreventGradient",
        "Snapshot",
        "CheckNumerics",
    ),
    "ReadVariableOp",
)
_ARITHMETIC = {
    "Sub": "Sub",
    "RealDiv": "Div",
    "Div": "Div",
    "Mul": "Mul",
    "Add": "Add",
    "AddV2": "Add",
    "BiasAdd": "Add",
}
_ADDITIONS = ("Add", "AddV2", "BiasAdd")
_RESHAPES = ("Reshape", "Squeeze", "ExpandDims")
_POOLS = ("Mean", "AvgPool")
_CONSTANTS = ("Const", "VarHandleOp", "Variable", "VariableV2")
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
        self._makers = {node.output: node for node in graph.nodes}
        self._splits = {node.name: node for node in graph.nodes if node.op == "Split"}
        self._nearest: dict[str, Node | None] = {}
        wanted = self._behind(graph.outputs) if graph.outputs else graph.nodes
        kept = self._without_groups([node for node in wanted if node.op not in _SAME])
        convs = [node for node in kept if node.op == "Conv2D"]
        self._layout = self._only_layout(convs)
        kept = self._with_norms(kept)
        stem = self._stem(convs)
        start = self._start(stem)
        origin = self._makers.get(start)
        if not from_anywhere and (origin is None or origin.op not in _INPUTS):
            kind = "nothing" if origin is None else origin.op
            raise ValueError(
                f"its images are prepared by {kind} ({start!r:.80}); expected the graph's input,"
                " and after it only arithmetic with mean and standard deviation"
            )
        before = {node.name for node in self._behind((start,))}
        self._uses = Counter(
            value for node in kept for value in dict.fromkeys(map(self.source, node.inputs))
        )
        self.inputs = (start,)
        self.nodes = tuple(
            self._translated([node for node in kept if node.name not in before], stem)
        )
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
        value, _, layout = name.partition("#")
        values = self._evaluated(value)
        if values is None or not layout:
            return values
        if values.ndim == 4 and f"#{layout}" == _KERNEL:
            return values.transpose(3, 2, 0, 1)
        if values.ndim == 4 and values.shape[:2] == (1, 1) and f"#{layout}" == _MATRIX:
            return values[0, 0]
        if values.ndim == 2 and f"#{layout}" in (_MATRIX, _TURNED):
            return values.T if f"#{layout}" == _TURNED else values
        if f"#{layout}" == _FLAT:
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
        node = self._stored(name.partition("#")[0])
        return (None, 0) if node is None else (self._graph.place(node), self._graph.dtype(node))

    def halves(self) -> list[str]:
        """Return the stored names of used constants that are not float32."""
        names = dict.fromkeys(value for operator in self.nodes for value in operator.input)
        places = dict.fromkeys(self.place(name) for name in names)
        return [name for name, dtype in places if name is not None and dtype in FLOATS[1:]]

    # Values

    def source(self, value: str) -> str:
        """Return the value that a value is, behind functions and nodes that change nothing."""
        for _ in range(100):
            value = self._graph.actual(value)
            maker = self._makers.get(value)
            if maker is None or maker.op not in _SAME or not maker.inputs:
                return value
            value = maker.inputs[0]
        raise ValueError(f"{value!r:.80} is behind 100 nodes that change nothing")

    def _maker(self, value: str) -> Node | None:
        return self._makers.get(self.source(value))

    def _evaluated(self, value: str, depth: int = 0) -> np.ndarray | None:
        """Return a constant, also a reshaped one; None if it is computed otherwise."""
        node = self._maker(value)
        if node is None or depth > 8:
            return None
        if node.op in _CONSTANTS:
            return self._graph.array(node)
        values = (
            self._evaluated(node.inputs[0], depth + 1)
            if node.op in _RESHAPES and node.inputs
            else None
        )
        if values is not None and node.op == "Squeeze":
            return values.squeeze(tuple(_list(node, "squeeze_dims")) or None)
        if values is not None and len(node.inputs) == 2:
            shape = self._integers(node.inputs[1], 8)
            return (
                values.reshape(shape)
                if node.op == "Reshape"
                else np.expand_dims(values, tuple(shape))
            )
        return None

    def _stored(self, value: str) -> Node | None:
        """Return the node of the constant that a value is, also a reshaped one; None if it is none."""
        node = self._maker(value)
        for _ in range(8):
            if node is None or node.op not in _RESHAPES or not node.inputs:
                break
            node = self._maker(node.inputs[0])
        return node if node is not None and node.op in _CONSTANTS else None

    def _is_constant(self, value: str) -> bool:
        return self._stored(value) is not None

    def _integers(self, value: str, count: int) -> list[int]:
        """Return a constant of a few integers; empty if it is something else."""
        node = self._maker(value)
        if (
            node is None
            or node.op not in _CONSTANTS
            or np.prod(self._graph.shape(node), dtype=np.float64) > count
        ):
            return []
        values = self._graph.array(node)
        return [int(each) for each in values.ravel()] if values.dtype.kind == "i" else []

    def _behind(self, values: tuple[str, ...]) -> list[Node]:
        """Return the nodes that values are computed by, in the order of the graph."""
        seen: set[str] = set()
        waiting = list(values)
        while waiting:
            value = self._graph.actual(waiting.pop())
            node = self._makers.get(value) or self._makers.get(f"{value.rpartition(':')[0]}:0")
            if node is not None and node.name not in seen:
                seen.add(node.name)
                waiting += node.inputs
        return [node for node in self._graph.nodes if node.name in seen]

    # Convolutions

    def _only_layout(self, convs: list[Node]) -> str:
        """Return NHWC or NCHW."""
        layouts = sorted({_text(node, "data_format", "NHWC") for node in convs})
        if layouts not in (["NHWC"], ["NCHW"]):
            raise ValueError(
                f"its convolutions have the layouts {layouts!s:.80}, expected all NHWC or all NCHW"
            )
        return layouts[0]

    def _conv_before(self, value: str) -> Node | None:
        """Return the convolution that a value comes from, along the first inputs that are not
        constants."""
        path: list[str] = []
        found: Node | None = None
        value = self.source(value)
        while value not in self._nearest and len(path) <= len(self._graph.nodes):
            path.append(value)
            node = self._makers.get(value)
            if node is not None and node.op == "Conv2D":
                found = node
                break
            others = (
                [each for each in node.inputs if not self._is_constant(each)]
                if node is not None
                else []
            )
            if not others:
                break
            value = self.source(others[0])
        found = self._nearest.get(value, found)
        self._nearest |= dict.fromkeys(path, found)
        return found

    def _stem(self, convs: list[Node]) -> Node:
        first = [
            node
            for node in convs
            if len(node.inputs) == 2 and self._conv_before(node.inputs[0]) is None
        ]
        if len(first) != 1:
            names = ", ".join(node.name[:80] for node in first[:3]) or "none"
            raise ValueError(
                f"it has {len(first)} convolutions of its images ({names}), expected one"
            )
        return first[0]

    def _groups(self, conv: Node) -> int:
        """Return the number of groups: TensorFlow's kernel has the inputs of one group."""
        before = self._conv_before(conv.inputs[0])
        inputs = _COLOURS if before is None else self._kernel(before)[3]
        return inputs // max(self._kernel(conv)[2], 1)

    def _kernel(self, conv: Node) -> tuple[int, ...]:
        """Return the shape of a kernel, HWIO."""
        node = self._maker(conv.inputs[1])
        if node is None or node.op not in _CONSTANTS or len(self._graph.shape(node)) != 4:
            raise ValueError(f"the kernel of {conv.name!r:.80} is not a constant of four axes")
        return self._graph.shape(node)

    def _without_groups(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes with one convolution in place of the convolutions of groups and their
        Concat."""
        parts: set[str] = set()
        joined: dict[str, Node] = {}
        for node in nodes:
            group = self._group(node)
            if group:
                images, kernels = (self._split(group[0].inputs[i]) for i in range(2))
                if images is not None and kernels is not None:
                    whole = Node(
                        node.name,
                        "Conv2D",
                        (images.inputs[1], kernels.inputs[1]),
                        group[0].attributes,
                    )
                    joined[node.name] = self._makers[node.output] = whole
                    parts |= {images.name, kernels.name, *(conv.name for conv in group)}
        return [joined.get(node.name, node) for node in nodes if node.name not in parts]

    def _group(self, node: Node) -> list[Node]:
        """Return the convolutions of a Concat whose images and kernels are the parts of one Split
        each; empty otherwise."""
        if node.op != "ConcatV2" or len(node.inputs) < 3:
            return []
        convs = [self._maker(value) for value in node.inputs[:-1]]
        group = [
            conv
            for conv in convs
            if conv is not None and conv.op == "Conv2D" and len(conv.inputs) == 2
        ]
        axis = {"NHWC": 3, "NCHW": 1}.get(_text(group[0], "data_format", "NHWC")) if group else None
        if len(group) != len(convs) or self._integers(node.inputs[-1], 1) not in (
            [axis],
            [(axis or 0) - 4],
        ):
            return []
        for i, along in ((0, axis), (1, 3)):
            split = self._split(group[0].inputs[i])
            if split is None or self._integers(split.inputs[0], 1) not in (
                [along],
                [(along or 0) - 4],
            ):
                return []
            if [self.source(conv.inputs[i]) for conv in group] != [
                f"{split.name}:{n}" for n in range(len(group))
            ]:
                return []
            if split.attributes["num_split"].i != len(group):
                return []
        alike = {
            (_text(c, "padding", ""), *_list(c, "strides"), *_list(c, "dilations")) for c in group
        }
        return group if len(alike) == 1 else []

    def _split(self, value: str) -> Node | None:
        node = self._splits.get(self.source(value).rpartition(":")[0])
        return (
            node
            if node is not None and len(node.inputs) == 2 and "num_split" in node.attributes
            else None
        )

    def _with_norms(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes with one batch norm in place of its parts.

        These compute x * f + (beta - mean * f), where f is rsqrt(variance + epsilon) * gamma.
        """
        products: set[str] = set()
        norms: dict[str, Node] = {}
        for node in nodes:
            try:
                product = self._made_by(node, 0, "Mul")
                shift = self._made_by(node, 1, "Sub")
                shrunk = self._made_by(shift, 1, "Mul")
                factor = self._made_by(product, 1, "Mul")
                total = self._made_by(self._made_by(factor, 0, "Rsqrt"), 0, "AddV2")
                epsilon = self._evaluated(total.inputs[1])
                is_norm = node.op == "AddV2" and self.source(shrunk.inputs[1]) == self.source(
                    product.inputs[1]
                )
            except LookupError:
                continue
            if is_norm and epsilon is not None and epsilon.size == 1:
                inputs = (
                    product.inputs[0],
                    factor.inputs[1],
                    shift.inputs[0],
                    shrunk.inputs[0],
                    total.inputs[0],
                )
                noted = {
                    "epsilon": message("Value")(f=float(epsilon.ravel()[0])),
                    "is_training": message("Value")(),
                }
                noted["data_format"] = message("Value")(s=self._layout.encode())
                norms[node.name] = self._makers[node.output] = Node(
                    node.name, "FusedBatchNormV3", inputs, noted
                )
                products.add(product.name)
        return [norms.get(node.name, node) for node in nodes if node.name not in products]

    def _made_by(self, node: Node, number: int, op: str) -> Node:
        """Return the node that makes an input. Raises `LookupError` if it is not of this operator."""
        maker = self._maker(node.inputs[number])
        if maker is None or maker.op != op:
            raise LookupError
        return maker

    def _start(self, stem: Node) -> str:
        """Return the value that mean and standard deviation are applied to, or else the stem's
        images."""
        value = self.source(self._unpadded(stem)[0])
        for _ in range(16):
            node = self._makers.get(value)
            computed = (
                [each for each in node.inputs if not self._is_constant(each)]
                if node is not None
                else []
            )
            if node is None or node.op not in (*_ARITHMETIC, "Transpose") or len(computed) != 1:
                break
            if node.op == "Transpose" and self._permutation(node) != _TO_NCHW:
                break
            value = self.source(computed[0])
        return value

    # Operators

    def _translated(self, nodes: list[Node], stem: Node) -> Iterator[Operator]:
        """Yield the operators of nodes. An addition to a convolution is its bias."""
        merged: set[str] = set()
        followers = {self.source(value): node for node in nodes for value in node.inputs}
        for node in nodes:
            if node.op == "Conv2D" and len(node.inputs) == 2 and not self._is_head(node):
                follower = followers.get(node.output)
                if (
                    follower is not None
                    and self._uses[node.output] == 1
                    and self._is_bias(follower)
                ):
                    merged.add(follower.name)
                    yield from self._convolution(node, stem, follower)
                else:
                    yield from self._convolution(node, stem, None)
        padded = Counter(
            self.source(n.inputs[0])
            for n in nodes
            if n.op in ("Conv2D", "MaxPool") and self._is_padded(n)
        )
        for node in nodes:
            is_folded = node.op == "Pad" and padded[node.output] == self._uses[node.output]
            if node.op == "Conv2D" and len(node.inputs) == 2 and self._is_head(node):
                yield Operator(
                    "MatMul",
                    [self.source(node.inputs[0]), self.source(node.inputs[1]) + _MATRIX],
                    [node.output],
                )
            elif (
                node.op != "Conv2D"
                and node.name not in merged
                and not is_folded
                and node.op not in _CONSTANTS
            ):
                yield self._operator(node, stem)

    def _convolution(self, node: Node, stem: Node, bias: Node | None) -> Iterator[Operator]:
        value, pads = self._unpadded(node)
        if node is stem and self._layout == "NHWC":
            maker = self._makers.get(value)
            if (
                maker is not None
                and maker.op == "Transpose"
                and self._permutation(maker) == _TO_NHWC
            ):
                value = self.source(maker.inputs[0])
            else:
                yield Operator("Transpose", [value], [f"{value}#nchw"], {"perm": _TO_NCHW})
                value = f"{value}#nchw"
        inputs = [value, self.source(node.inputs[1]) + _KERNEL]
        output = node.output
        if bias is not None:
            inputs.append(self._other(bias, node.output) + _FLAT)
            output = bias.output
        attributes = self._window(node, pads) | {"group": self._groups(node)}
        yield Operator("Conv", inputs, [output], attributes)

    def _operator(self, node: Node, stem: Node) -> Operator:
        inputs = [self.source(value) for value in node.inputs]
        output = [node.output]
        is_laid_out = _text(node, "data_format", "NHWC") == self._layout
        is_inference = is_laid_out and not _flag(node, "is_training", True)
        if node.op.startswith("FusedBatchNorm") and len(inputs) == 5 and is_inference:
            epsilon = node.attributes["epsilon"].f if "epsilon" in node.attributes else 1e-4
            norm = [f"{value}{_FLAT}" for value in inputs[1:]]
            return Operator("BatchNormalization", [inputs[0], *norm], output, {"epsilon": epsilon})
        if node.op == "MaxPool" and len(inputs) == 1 and is_laid_out:
            value, pads = self._unpadded(node)
            kernel = self._spatial(_list(node, "ksize"))
            return Operator(
                "MaxPool", [value], output, self._window(node, pads) | {"kernel_shape": kernel}
            )
        if node.op == "AvgPool" and len(inputs) == 1 and is_laid_out:
            return Operator(
                "AveragePool", inputs, output, {"kernel_shape": self._spatial(_list(node, "ksize"))}
            )
        if node.op == "Mean" and len(inputs) == 2:
            axes = self._integers(inputs[1], 4)
            places = _TO_NHWC if self._layout == "NHWC" else range(4)
            return Operator(
                "ReduceMean",
                inputs[:1],
                output,
                {"axes": [places[axis] for axis in axes if -4 <= axis < 4]},
            )
        if node.op == "MatMul" and len(inputs) == 2 and not _flag(node, "transpose_a", False):
            layout = _TURNED if _flag(node, "transpose_b", False) else _MATRIX
            return Operator("MatMul", [inputs[0], inputs[1] + layout], output)
        if node.op == "Transpose" and len(inputs) == 2:
            return Operator("Transpose", inputs[:1], output, {"perm": self._permutation(node)})
        if node.op in _RESHAPES and inputs:
            return Operator("Reshape", inputs[:1], output)
        if node.op in ("Relu", "Shape") and len(inputs) == 1:
            return Operator(node.op, inputs, output)
        kind = _ARITHMETIC.get(node.op) if len(inputs) == 2 else None
        return Operator(kind or f"TensorFlow's {node.op}", inputs, output)

    def _permutation(self, node: Node) -> list[int]:
        return self._integers(node.inputs[1], 4) if len(node.inputs) == 2 else []

    def _other(self, addition: Node, value: str) -> str:
        """Return the second term of an addition."""
        return next(
            (self.source(each) for each in addition.inputs if self.source(each) != value), value
        )

    def _is_bias(self, node: Node) -> bool:
        """Return whether a node adds a constant with one number for each channel."""
        constants = [each for each in node.inputs if self._is_constant(each)]
        if node.op not in _ADDITIONS or len(node.inputs) != 2 or len(constants) != 1:
            return False
        if node.op == "BiasAdd":
            return _text(node, "data_format", "NHWC") == self._layout
        maker = self._maker(constants[0])
        is_reshaped = maker is not None and maker.op == "Reshape" and len(maker.inputs) == 2
        if maker is None or (maker.op not in _CONSTANTS and not is_reshaped):
            return False
        shape = self._integers(maker.inputs[1], 4) if is_reshaped else self._graph.shape(maker)
        channel = -1 if self._layout == "NHWC" else -3
        return len(shape) >= -channel and all(
            size == 1 for i, size in enumerate(shape) if i != len(shape) + channel
        )

    def _is_head(self, conv: Node) -> bool:
        """Return whether a convolution is a classifier: what it multiplies is an average over the
        images."""
        value = self.source(conv.inputs[0])
        for _ in range(4):
            node = self._makers.get(value)
            if node is None or node.op not in _RESHAPES:
                break
            value = self.source(node.inputs[0])
        node = self._makers.get(value)
        return node is not None and node.op in _POOLS

    def _is_padded(self, node: Node) -> bool:
        return self._unpadded(node)[1] != [0] * 4

    def _unpadded(self, node: Node) -> tuple[str, list[int]]:
        """Return the images of a window before a Pad, and what this pads: top, left, bottom, right."""
        value = self.source(node.inputs[0])
        pad = self._makers.get(value)
        if (
            pad is None
            or pad.op != "Pad"
            or len(pad.inputs) != 2
            or _text(node, "padding", "") != "VALID"
        ):
            return value, [0] * 4
        found = self._integers(pad.inputs[1], 8)
        if len(found) != 8:
            return value, [0] * 4
        by_axis = [found[i : i + 2] for i in range(0, 8, 2)]
        channel = 3 if self._layout == "NHWC" else 1
        (top, bottom), (left, right) = (by_axis[axis] for axis in (1, 2, 3) if axis != channel)
        if by_axis[0] != [0, 0] or by_axis[channel] != [0, 0]:
            return value, [0] * 4
        return self.source(pad.inputs[0]), [top, left, bottom, right]

    def _window(self, node: Node, pads: list[int]) -> dict[str, Any]:
        """Return the attributes of a window that ONNX has."""
        kind = _text(node, "padding", "")
        explicit = _list(node, "explicit_paddings")
        if kind == "EXPLICIT" and len(explicit) == 8:
            begins = self._spatial(explicit[::2])
            ends = self._spatial(explicit[1::2])
            pads = [*begins, *ends]
            kind = "VALID"
        dilations = _list(node, "dilations") or [1] * 4
        return {
            "auto_pad": {"SAME": b"SAME_UPPER"}.get(kind, kind.encode()),
            "pads": pads,
            "strides": self._spatial(_list(node, "strides")),
            "dilations": self._spatial(dilations),
        }

    def _spatial(self, values: list[int]) -> list[int]:
        """Return the numbers of height and width of a list for four axes."""
        if len(values) != 4:
            return []
        return values[1:3] if self._layout == "NHWC" else values[2:]


def _text(node: Node, name: str, default: str) -> str:
    return (
        bytes(node.attributes[name].s).decode(errors="replace")
        if name in node.attributes
        else default
    )


def _flag(node: Node, name: str, default: bool) -> bool:
    return bool(node.attributes[name].b) if name in node.attributes else default


def _list(node: Node, name: str) -> list[int]:
    return [int(each) for each in node.attributes[name].list.i] if name in node.attributes else []
