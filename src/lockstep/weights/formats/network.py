"""A ResNet in a graph of nodes: found by following them from the images to the classifier.

Names in such graphs may be anything, so the order of nodes and the shapes of their constants
decide. A model is

    [Cast, Transpose, Sub, Div, Mul, Add]     preprocessing, read as the recipe's mean and std
    unit, Relu, MaxPool                       the stem; a unit is Conv and perhaps BatchNormalization
    unit, Relu, ..., unit, Add, Relu          blocks; the other input of Add is the block's input, perhaps after a unit
    GlobalAveragePool or ReduceMean           or an AveragePool of a fixed size
    Gemm, or MatMul and Add                   the classifier

A model for inference often has its batch norms folded into its convolutions. Then the canonical
batch norm is the identity apart from its bias: scale 1, running mean 0, and a variance that is 1
together with epsilon.

If something does not fit, it is an error. Operators and layouts are ONNX's (NCHW, kernels OIHW);
`onnx_graph` and `tensorflow_graph` give their nodes like this.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from lockstep.models.architectures import MODELS, Conv, ModelSpec, blocks, stem
from lockstep.recipes import Recipe

Padding = Literal["symmetric", "same"]
Colour = tuple[float, float, float]
ROUNDING = ("QuantizeLinear", "DequantizeLinear")
"""Nodes that in pairs round floats to multiples of a scale."""
_EPSILON = 1e-5
_PASSED = ("Identity", "Dropout", *ROUNDING)
"""Nodes that change nothing during inference, or that are left out with a remark."""
_POOLS = ("GlobalAveragePool", "ReduceMean", "AveragePool")
_RESHAPES = ("Flatten", "Reshape", "Squeeze")
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
"""What the inputs of a BatchNormalization are, after the values that it normalises."""
_COMPUTING = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization")
"""Nodes that have weights."""


class Graph(Protocol):
    """Nodes in ONNX's terms: each has `op_type`, and the names of its values `input` and `output`."""

    @property
    def nodes(self) -> Sequence[Any]:
        """All nodes."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the inputs that are not constants."""

    @property
    def users(self) -> Mapping[str, Sequence[Any]]:
        """The nodes that use each value, in the order of the graph."""

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of a node's attribute."""

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant; None if it is computed from images. Raises `ValueError`."""

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""

    def place(self, name: str) -> tuple[str | None, Any]:
        """Return the name under which a file stores a constant; None if it is none. The rest is for
        the graph alone."""


@dataclass(frozen=True)
class Unit:
    """A convolution, and its batch norm if it is a separate node."""

    weight: np.ndarray
    bias: np.ndarray | None
    norm: tuple[np.ndarray, ...]
    """Scale, bias, running mean and variance; empty if it is folded into the convolution."""
    epsilon: float | None
    stride: int
    groups: int
    padding: Padding | None
    """None if both kinds of padding are the same."""
    constants: tuple[str, ...]
    """The values that these arrays are in the graph: weight, batch norm, bias, as far as the unit
    has them."""

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """Outputs, inputs, kernel, stride and groups."""
        outputs, inputs, kernel, _ = self.weight.shape
        return outputs, inputs * self.groups, kernel, self.stride, self.groups


@dataclass(frozen=True)
class Network:
    """What a graph computes."""

    units: list[Unit]
    """The stem, then the units of every block in order, its shortcut last."""
    spec: ModelSpec
    padding: Padding
    mean: Colour
    std: Colour
    normalises: bool
    """Whether the graph normalises its images; otherwise mean and std are not in it."""
    head: tuple[np.ndarray, np.ndarray]
    """Weight (out, in) and bias of the classifier."""
    constants: tuple[str, ...]
    """The values that the classifier's arrays are in the graph."""
    remarks: tuple[str, ...]

    @property
    def folded(self) -> int:
        """The number of batch norms that are folded into their convolutions."""
        return sum(not unit.norm for unit in self.units)

    @property
    def model(self) -> str | ModelSpec:
        """The name of the model, if it has one."""
        return next((name for name, known in MODELS.items() if known == self.spec), self.spec)

    @property
    def epsilon(self) -> float:
        """What all batch norms add to variances. Raises `ValueError` if they add different numbers."""
        values = {unit.epsilon for unit in self.units if unit.epsilon is not None} or {_EPSILON}
        if len(values) > 1:
            raise ValueError(
                f"its batch norms have the epsilons {sorted(values)}, expected one for all"
            )
        return values.pop()

    def recipe(self) -> Recipe:
        """Return the default recipe with what the graph says. Raises `ValueError` or `RecipeError`."""
        return Recipe(
            model=self.model,
            logits=self.head[1].size,
            precision="fp32",
            padding=self.padding,
            bn_epsilon=self.epsilon,
            mean=self.mean,
            std=self.std,
        )

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the canonical tensors."""
        values: dict[str, np.ndarray] = {}
        for conv, unit in zip(_convolutions(self.spec), self.units, strict=True):
            values |= _tensors(conv, unit, self.epsilon)
        return values | {"fc.weight": self.head[0], "fc.bias": self.head[1]}

    def made(self, graph: Graph) -> Iterator[tuple[str, str]]:
        """Yield every canonical tensor and the name of a stored constant of the graph that it is
        made of."""
        parts = [*zip(("fc.weight", "fc.bias"), self.constants, strict=False)]
        for conv, unit in zip(_convolutions(self.spec), self.units, strict=True):
            last = f"{conv.bn_name}.{'running_mean' if unit.norm else 'bias'}"
            norm = [f"{conv.bn_name}.{suffix}" for suffix in _BATCH_NORM] if unit.norm else []
            parts += zip((f"{conv.name}.weight", *norm, last), unit.constants, strict=False)
        for tensor, value in parts:
            place, _ = graph.place(value)
            if place is not None:
                yield tensor, place

    def about_units(self) -> Iterator[str]:
        """Yield remarks on batch norms and biases."""
        if self.folded:
            yield (
                f"{self.folded} of {len(self.units)} batch norms are folded into their"
                " convolutions, and the identity stands for them: use these weights for inference"
                " only"
            )
        if any(unit.norm and unit.bias is not None for unit in self.units):
            yield (
                "biases of convolutions were subtracted from the running means, which computes the"
                " same"
            )


def follow(graph: Graph) -> Network:
    """Return what a graph computes.

    Raises `ValueError`, `LookupError`, `TypeError` or `RecursionError` if it is not a ResNet.
    """
    return _Walk(graph).network()


class _Walk:
    """Follows a graph from its input. What is not a ResNet raises `ValueError`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps = 8 * len(graph.nodes)
        self._used: set[str] = set()
        self._paddings: set[Padding] = set()
        self._remarks: list[str] = []
        self._normalises = True

    def network(self) -> Network:
        """Return what the graph computes."""
        value, mean, std = self._preprocessing()
        first, value = self._unit(self._next(value, "Conv"))
        value = self._next(value, "Relu").output[0]
        value = self._max_pool(self._next(value, "MaxPool"))
        found: list[tuple[list[Unit], list[Unit]]] = []
        while not any(node.op_type in _POOLS for node in self._users(value)):
            main, shortcut, value = self._block(value)
            found.append((main, shortcut))
        head, constants = self._head(value)
        self._check_complete()
        units = [first, *(unit for block in found for branch in block for unit in branch)]
        spec = _spec(first, found)
        _check_units(spec, units)
        self._paddings |= {unit.padding for unit in units if unit.padding is not None}
        if len(self._paddings) != 1:
            raise ValueError(
                f"its windows are padded in {len(self._paddings)} ways, expected one of symmetric"
                " and same"
            )
        return Network(
            units,
            spec,
            self._paddings.pop(),
            mean,
            std,
            self._normalises,
            head,
            constants,
            tuple(self._remarks),
        )

    def _users(self, value: str) -> list[Any]:
        """Return the nodes that compute with a value, behind nodes of `_PASSED`."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError("its nodes form a circle")
        found = []
        for node in self._graph.users.get(value, ()):
            if node.op_type in _PASSED:
                found += self._users(node.output[0])
            elif node.op_type != "Shape":
                found.append(node)
        return found

    def _next(self, value: str, *expected: str) -> Any:
        """Return the only node that uses a value. It must be of an expected type."""
        found = self._users(value)
        if len(found) != 1 or found[0].op_type not in expected:
            kinds = ", ".join(node.op_type for node in found) or "nothing"
            raise ValueError(f"{value!r} is used by {kinds}, expected {' or '.join(expected)}")
        self._used.add(found[0].output[0])
        return found[0]

    def _preprocessing(self) -> tuple[str, Colour, Colour]:
        """Return the value that the first convolution takes, and the mean and std that the nodes
        before it apply."""
        if len(self._graph.inputs) != 1:
            raise ValueError(f"it has the inputs {list(self._graph.inputs)}, expected one: images")
        value = self._graph.inputs[0]
        nodes = []
        while True:
            node = self._next(value, "Conv", "Cast", "Transpose", "Sub", "Div", "Mul", "Add")
            if node.op_type == "Conv":
                break
            nodes.append((node, value))
            value = node.output[0]
        mean = np.zeros(3)
        std = np.ones(3)
        for i, (node, before) in enumerate(nodes):
            if node.op_type == "Transpose":
                if list(self._graph.attribute(node, "perm", [])) != [0, 3, 1, 2]:
                    raise ValueError(
                        f"{node.output[0]!r} transposes images otherwise than from NHWC to NCHW"
                    )
            elif node.op_type != "Cast":
                channels_last = any(later.op_type == "Transpose" for later, _ in nodes[i:])
                mean, std = self._normalised(node, before, channels_last, mean, std)
        return value, *self._colours(mean, std)

    def _normalised(
        self, node: Any, before: str, channels_last: bool, mean: np.ndarray, std: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and std after a node that computes with a constant of one value, or of one a
        channel."""
        others = [name for name in node.input if name != before]
        if (
            len(node.input) != 2
            or len(others) != 1
            or (node.op_type in ("Sub", "Div") and node.input[0] != before)
        ):
            raise ValueError(
                f"{node.output[0]!r}: preprocessing by {node.op_type} is not images and a constant,"
                " in this order"
            )
        constant = self._graph.floats(others[0], f"the constant of {node.op_type}")
        axes = [axis - constant.ndim for axis, size in enumerate(constant.shape) if size != 1]
        if constant.size not in (1, 3) or axes not in ([], [-1 if channels_last else -3]):
            raise ValueError(
                f"{node.output[0]!r}: a constant of shape {list(constant.shape)} is not a value for"
                " each channel"
            )
        # The shortest decimal number that rounds to the float32 is the one that a recipe had.
        values = np.array([float(str(value)) for value in constant.ravel()])
        if node.op_type in ("Div", "Mul") and not values.all():
            raise ValueError(f"{node.output[0]!r}: images are divided or multiplied by 0")
        if node.op_type == "Sub":
            return mean + values * std, std
        if node.op_type == "Add":
            return mean - values * std, std
        return mean, std * values if node.op_type == "Div" else std / values

    def _colours(self, mean: np.ndarray, std: np.ndarray) -> tuple[Colour, Colour]:
        """Return the recipe's mean and std. Without preprocessing in the graph they are those of
        ImageNet."""
        if not mean.any() and (std == 1).all():
            self._normalises = False
            default = Recipe()
            return default.mean, default.std
        if max(*np.abs(mean), *std) <= 1:
            self._remarks.append(
                "its mean and std are for images from 0 to 1; the recipe's are 255 times as large"
            )
            mean = mean * 255
            std = std * 255
        if min(*mean, *std) <= 0:
            found = f"mean {mean.tolist()} and std {std.tolist()}"
            raise ValueError(
                f"its preprocessing has {found}, expected positive numbers. Export the model"
                " without preprocessing"
            )
        return (float(mean[0]), float(mean[1]), float(mean[2])), (
            float(std[0]),
            float(std[1]),
            float(std[2]),
        )

    def _unit(self, node: Any) -> tuple[Unit, str]:
        """Return the unit of a convolution, and the value after it."""
        self._used.add(node.output[0])
        weight = self._graph.floats(node.input[1], "a kernel")
        if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
            raise ValueError(
                f"{node.input[1]!r} has the shape {list(weight.shape)}, expected a square kernel"
            )
        biases = [name for name in node.input[2:3] if name]
        bias = self._graph.floats(biases[0], "a bias") if biases else None
        stride = self._stride(node)
        padding = self._padding(node, weight.shape[2], stride)
        groups = int(self._graph.attribute(node, "group", 1))
        value = node.output[0]
        after = self._users(value)
        norm = tuple[np.ndarray, ...]()
        norms = tuple[str, ...]()
        epsilon = None
        if len(after) == 1 and after[0].op_type == "BatchNormalization":
            norms = tuple(after[0].input[1:5])
            norm = tuple(self._graph.floats(name, "a batch norm's constant") for name in norms)
            # The attribute is a float32; a recipe has the decimal number.
            epsilon = float(str(np.float32(self._graph.attribute(after[0], "epsilon", _EPSILON))))
            value = after[0].output[0]
            self._used.add(value)
        of_channels = [*norm, *([] if bias is None else [bias])]
        if len(norm) not in (0, 4) or any(
            values.shape != weight.shape[:1] for values in of_channels
        ):
            raise ValueError(
                f"{node.output[0]!r}: bias and batch norm do not have one value for each of its"
                " channels"
            )
        constants = (node.input[1], *norms, *biases)
        return Unit(weight, bias, norm, epsilon, stride, groups, padding, constants), value

    def _stride(self, node: Any) -> int:
        strides, dilations = (
            list(self._graph.attribute(node, name, [1, 1])) for name in ("strides", "dilations")
        )
        if len(strides) != 2 or strides[0] != strides[1] or dilations != [1, 1]:
            raise ValueError(f"{node.output[0]!r} has strides {strides} and dilations {dilations}")
        return int(strides[0])

    def _padding(self, node: Any, kernel: int, stride: int) -> Padding | None:
        """Return how a window is padded; None if both ways are the same."""
        kind = self._graph.attribute(node, "auto_pad", b"NOTSET")
        if not isinstance(kind, bytes):
            raise ValueError(f"{node.output[0]!r} has the auto_pad {kind!r:.60}, expected a text")
        pads = list(self._graph.attribute(node, "pads", [0] * 4))
        is_either = kernel == 1 or stride == 1
        if kind == b"SAME_UPPER":
            return None if is_either else "same"
        if kind in (b"NOTSET", b"VALID"):
            if pads == [kernel // 2] * 4:
                return None if is_either else "symmetric"
            if stride == 2 and pads == [(kernel - 2) // 2] * 2 + [(kernel - 1) // 2] * 2:
                return "same"  # of an image whose sides are even
        raise ValueError(
            f"{node.output[0]!r} is padded by {pads} ({kind.decode(errors='replace')}) around a"
            f" window of {kernel}"
        )

    def _max_pool(self, node: Any) -> str:
        """Return the value after the stem's pool, and note how it is padded."""
        kernel = list(self._graph.attribute(node, "kernel_shape", []))
        stride = self._stride(node)
        if (kernel, stride, self._graph.attribute(node, "ceil_mode", 0)) != ([3, 3], 2, 0):
            raise ValueError(
                f"{node.output[0]!r} is not a 3x3 pool of stride 2 that rounds sizes down"
            )
        padding = self._padding(node, 3, stride)
        self._paddings |= {padding} if padding is not None else set()
        return str(node.output[0])

    def _block(self, value: str) -> tuple[list[Unit], list[Unit], str]:
        """Return the units of a residual block and of its shortcut, and the value after it."""
        users = self._users(value)
        branches = [self._branch(node) for node in users if node.op_type in ("Conv", "Add")]
        if (
            len(users) != 2
            or len(branches) != 2
            or branches[0][1].output[0] != branches[1][1].output[0]
        ):
            kinds = ", ".join(node.op_type for node in users) or "nothing"
            raise ValueError(
                f"{value!r} is used by {kinds}, expected two branches that one Add joins"
            )
        (shortcut, _), (main, add) = sorted(branches, key=lambda branch: len(branch[0]))
        if len(shortcut) > 1 or len(main) not in (2, 3):
            raise ValueError(
                f"a block after {value!r} has branches of {len(main)} and {len(shortcut)}"
                " convolutions"
            )
        self._used.add(add.output[0])
        return main, shortcut, self._next(add.output[0], "Relu").output[0]

    def _branch(self, node: Any) -> tuple[list[Unit], Any]:
        """Return the units from a node to the next Add, and this Add."""
        units = []
        while node.op_type == "Conv":
            unit, value = self._unit(node)
            units.append(unit)
            node = self._next(value, "Relu", "Add")
            if node.op_type == "Relu":
                node = self._next(node.output[0], "Conv")
        return units, node

    def _head(self, value: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[str, ...]]:
        """Return weight (out, in) and bias of the classifier after the pool, and the values that
        they are in the graph."""
        node = self._next(value, *_POOLS)
        self._check_pool(node)
        node = self._next(node.output[0], "Gemm", "MatMul", *_RESHAPES)
        while node.op_type in _RESHAPES:
            node = self._next(node.output[0], "Gemm", "MatMul", *_RESHAPES)
        weight = self._graph.floats(node.input[1], "the classifier's weight")
        if node.op_type == "Gemm":
            factors = [
                self._graph.attribute(node, name, default)
                for name, default in (("alpha", 1), ("beta", 1), ("transA", 0))
            ]
            if factors != [1, 1, 0]:
                raise ValueError(
                    f"the classifier has alpha, beta and transA {factors}, expected 1, 1 and 0"
                )
            weight = weight if self._graph.attribute(node, "transB", 0) else weight.T
            biases = list(node.input[2:3])
            bias = (
                self._graph.floats(biases[0], "its bias")
                if biases
                else np.zeros(len(weight), np.float32)
            )
        else:
            weight = weight.T
            add = self._next(node.output[0], "Add")
            [constant] = biases = [name for name in add.input if name != node.output[0]] or [""]
            bias = self._graph.floats(constant, "the classifier's bias")
        if weight.ndim != 2 or bias.size != len(weight):
            raise ValueError(
                f"the classifier has a weight of {list(weight.shape)} and a bias of"
                f" {list(bias.shape)}"
            )
        return (np.ascontiguousarray(weight), bias.reshape(-1)), (node.input[1], *biases)

    def _check_pool(self, node: Any) -> None:
        """Raise `ValueError` if the last pool does not average over the whole image."""
        if node.op_type == "AveragePool":
            kernel = list(self._graph.attribute(node, "kernel_shape", []))
            self._remarks.append(
                f"its last pool has a fixed size, {kernel}; here it averages over all of the image"
            )
        elif node.op_type == "ReduceMean":
            axes = self._graph.attribute(node, "axes", None)
            if axes is None and len(node.input) > 1:
                axes = self._graph.constant(node.input[1])
            found = sorted(
                axis % 4 for axis in (np.ravel(axes).tolist() if axes is not None else [])
            )
            if found != [2, 3]:
                raise ValueError(
                    f"{node.output[0]!r} averages over the axes {found}, expected [2, 3]"
                )

    def _check_complete(self) -> None:
        """Raise `ValueError` if the graph has weights that were not read."""
        others = [
            node
            for node in self._graph.nodes
            if node.op_type in _COMPUTING and node.output[0] not in self._used
        ]
        if others:
            raise ValueError(
                f"it has {len(others)} more nodes with weights, such as {others[0].op_type}"
                f" {others[0].output[0]!r}; results would be wrong without them"
            )


def _spec(first: Unit, found: list[tuple[list[Unit], list[Unit]]]) -> ModelSpec:
    """Return the model of these blocks. A stage begins where a block has a stride, the first one at
    the first block."""
    starts = [
        i for i, (main, _) in enumerate(found) if i == 0 or any(unit.stride != 1 for unit in main)
    ]
    if len(starts) != 4:
        raise ValueError(
            f"its {len(found)} blocks halve the image in {max(len(starts) - 1, 0)} places, expected"
            " four stages"
        )
    one, two, three, four = (
        stop - start for start, stop in itertools.pairwise([*starts, len(found)])
    )
    widths = [found[i][0][0].numbers[0] for i in starts]
    main = found[starts[1]][0]
    return ModelSpec(
        block="basic" if len(main) == 2 else "bottleneck",
        layers=(one, two, three, four),
        stem_width=first.numbers[0],
        widths=(widths[0], widths[1], widths[2], widths[3]),
        groups=main[1].groups,
        expansion=max(main[-1].numbers[0] // main[0].numbers[0], 1),
        stride_in="1x1" if len(main) == 3 and main[0].stride == 2 else "3x3",
    )


def _convolutions(spec: ModelSpec) -> list[Conv]:
    """Return a model's convolutions in the order of a network's units."""
    of_blocks = (
        conv
        for block in blocks(spec)
        for conv in (*block.convs, block.shortcut)
        if conv is not None
    )
    return [stem(spec), *of_blocks]


def _check_units(spec: ModelSpec, units: list[Unit]) -> None:
    """Raise `ValueError` if the units are not the model's convolutions."""
    convs = _convolutions(spec)
    if len(convs) != len(units):
        raise ValueError(
            f"it has {len(units)} convolutions, but a ResNet of these blocks and widths has"
            f" {len(convs)}"
        )
    for conv, unit in zip(convs, units, strict=True):
        expected = (conv.outputs, conv.inputs, conv.kernel, conv.stride, conv.groups)
        if unit.numbers != expected:
            raise ValueError(
                f"outputs, inputs, kernel, stride and groups of {conv.name} are {unit.numbers}, but"
                f" a ResNet of these blocks and widths has {expected}"
            )


def _tensors(conv: Conv, unit: Unit, epsilon: float) -> dict[str, np.ndarray]:
    """Return the canonical tensors of a unit. The bias of its convolution is in the running mean,
    or is batch norm's."""
    channels = len(unit.weight)
    bias = np.zeros(channels, np.float32) if unit.bias is None else unit.bias
    if unit.norm:
        scale, shift, mean, variance = unit.norm
        mean = (mean.astype(np.float64) - bias).astype(np.float32)
    else:
        scale = np.ones(channels, np.float32)
        shift = bias
        mean = np.zeros(channels, np.float32)
        # In float32 this and epsilon add up to exactly 1.
        variance = np.full(channels, 1 - epsilon, np.float32)
    suffixes = {"weight": scale, "bias": shift, "running_mean": mean, "running_var": variance}
    return {f"{conv.name}.weight": unit.weight} | {
        f"{conv.bn_name}.{suffix}": value for suffix, value in suffixes.items()
    }
