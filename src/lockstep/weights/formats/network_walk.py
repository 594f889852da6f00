"""A walk through a graph from its images to its classifier, which finds the ResNet in it: `follow`.

If something does not fit, it is an error: `ValueError`, unless another one is documented.
"""

from typing import Any, Literal

import numpy as np

from lockstep.recipes import Recipe
from lockstep.weights.formats.network import (
    ROUNDING,
    Branches,
    Colour,
    Graph,
    Network,
    Padding,
    Unit,
    build_spec,
    check_units,
)

_EPSILON = 1e-5
_PASSED = ("Identity", "Dropout", *ROUNDING)
"""Nodes that change nothing during inference, or that are left out with a remark."""
_POOLS = ("GlobalAveragePool", "ReduceMean", "AveragePool")
_RESHAPES = ("Flatten", "Reshape", "Squeeze")
_COMPUTING = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization")
"""Nodes that have weights."""


def follow(graph: Graph) -> Network:
    """Return what a graph computes.

    Raises `ValueError`, `LookupError`, `TypeError` or `RecursionError` if it is not a ResNet.
    """
    return _Walk(graph).follow()


class _Walk:
    """Follows a graph from its input. What is not a ResNet raises `ValueError`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps = 8 * len(graph.nodes)
        self._used: set[str] = set()
        self._paddings: set[Padding] = set()
        self._remarks: list[str] = []
        self._normalises = True

    def follow(self) -> Network:
        """Return what the graph computes."""
        value, mean, std = self._follow_preprocessing()
        first, value = self._read_unit(self._take_next(value, "Conv"))
        value = self._take_next(value, "Relu").output[0]
        value = self._follow_max_pool(self._take_next(value, "MaxPool"))
        units = [first]
        branches: list[Branches] = []
        while not any(node.op_type in _POOLS for node in self._find_users(value)):
            main, shortcut, value = self._follow_block(value)
            branches.append((main, shortcut))
            units += [*main, *shortcut]
        head, constants = self._read_head(value)
        self._check_complete()
        spec = build_spec(first, branches)
        check_units(spec, units)
        return Network(
            units,
            spec,
            self._choose_padding(units),
            mean,
            std,
            self._normalises,
            head,
            constants,
            tuple(self._remarks),
        )

    def _choose_padding(self, units: list[Unit]) -> Literal[Padding, "flax"]:
        """Return how the windows of the network are padded."""
        stem, *others = (unit.padding for unit in units)
        rest: set[Padding] = self._paddings.union(filter(None, others))
        if (stem, rest) == ("symmetric", {"same"}) and units[0].weight.shape[2] == 7:
            return "flax"
        paddings: set[Padding] = rest.union(filter(None, [stem]))
        if len(paddings) != 1:
            raise ValueError(
                f"its windows are padded in {len(paddings)} ways, expected one of symmetric, same"
                " and flax"
            )
        return paddings.pop()

    def _find_users(self, value: str) -> list[Any]:
        """Return the nodes that compute with a value, behind nodes of `_PASSED`."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError("its nodes form a circle")
        users = []
        for node in self._graph.users.get(value, ()):
            if node.op_type in _PASSED:
                users += self._find_users(node.output[0])
            elif node.op_type != "Shape":
                users.append(node)
        return users

    def _take_next(self, value: str, *expected: str) -> Any:
        """Return the only node that uses a value. It must be of an expected type."""
        users = self._find_users(value)
        if len(users) != 1 or users[0].op_type not in expected:
            kinds = _join_kinds(users)
            raise ValueError(f"{value!r} is used by {kinds}, expected {' or '.join(expected)}")
        self._used.add(users[0].output[0])
        return users[0]

    def _follow_preprocessing(self) -> tuple[str, Colour, Colour]:
        """Return the value that the first convolution takes, and the mean and std that the nodes
        before it apply."""
        if len(self._graph.inputs) != 1:
            raise ValueError(f"it has the inputs {list(self._graph.inputs)}, expected one: images")
        value = self._graph.inputs[0]
        nodes = []
        while True:
            node = self._take_next(value, "Conv", "Cast", "Transpose", "Sub", "Div", "Mul", "Add")
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
                mean, std = self._apply_constant(node, before, channels_last, mean, std)
        return value, *self._choose_colours(mean, std)

    def _apply_constant(
        self, node: Any, before: str, channels_last: bool, mean: np.ndarray, std: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and std after a node that computes with a constant of one value, or of one a
        channel."""
        others = [name for name in node.input if name != before]
        is_reversed = node.op_type in ("Sub", "Div") and node.input[0] != before
        if len(node.input) != 2 or len(others) != 1 or is_reversed:
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

    def _choose_colours(self, mean: np.ndarray, std: np.ndarray) -> tuple[Colour, Colour]:
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
            raise ValueError(
                f"its preprocessing has mean {mean.tolist()} and std {std.tolist()}, expected"
                " positive numbers. Export the model without preprocessing"
            )
        means = (float(mean[0]), float(mean[1]), float(mean[2]))
        return means, (float(std[0]), float(std[1]), float(std[2]))

    def _read_unit(self, node: Any) -> tuple[Unit, str]:
        """Return the unit of a convolution, and the value after it."""
        self._used.add(node.output[0])
        weight = self._graph.floats(node.input[1], "a kernel")
        if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
            raise ValueError(
                f"{node.input[1]!r} has the shape {list(weight.shape)}, expected a square kernel"
            )
        biases = list(filter(None, node.input[2:3]))
        bias = self._graph.floats(biases[0], "a bias") if biases else None
        stride = self._read_stride(node)
        padding = self._read_padding(node, weight.shape[2], stride)
        groups = int(self._graph.attribute(node, "group", 1))
        value = node.output[0]
        after = self._find_users(value)
        norm: tuple[np.ndarray, ...] = ()
        norms: tuple[str, ...] = ()
        epsilon = None
        if len(after) == 1 and after[0].op_type == "BatchNormalization":
            norms = tuple(after[0].input[1:5])
            norm = tuple(self._graph.floats(name, "a batch norm's constant") for name in norms)
            # The attribute is a float32; a recipe has the decimal number.
            epsilon = float(str(np.float32(self._graph.attribute(after[0], "epsilon", _EPSILON))))
            value = after[0].output[0]
            self._used.add(value)
        vectors = norm if bias is None else (*norm, bias)
        shapes = {vector.shape for vector in vectors}
        if len(norm) not in (0, 4) or shapes - {weight.shape[:1]}:
            raise ValueError(
                f"{node.output[0]!r}: bias and batch norm do not have one value for each of its"
                " channels"
            )
        constants = (node.input[1], *norms, *biases)
        return Unit(weight, bias, norm, epsilon, stride, groups, padding, constants), value

    def _read_stride(self, node: Any) -> int:
        strides = list(self._graph.attribute(node, "strides", [1, 1]))
        dilations = list(self._graph.attribute(node, "dilations", [1, 1]))
        if len(strides) != 2 or strides[0] != strides[1] or dilations != [1, 1]:
            raise ValueError(f"{node.output[0]!r} has strides {strides} and dilations {dilations}")
        return int(strides[0])

    def _read_padding(self, node: Any, kernel: int, stride: int) -> Padding | None:
        """Return how a window is padded; None if both ways are the same."""
        kind = self._graph.attribute(node, "auto_pad", b"NOTSET")
        if not isinstance(kind, bytes):
            raise ValueError(f"{node.output[0]!r} has the auto_pad {kind!r:.60}, expected a text")
        pads = list(self._graph.attribute(node, "pads", [0] * 4))
        is_either = kernel == 1 or stride == 1
        padding: Padding | None = None
        if kind == b"SAME_UPPER":
            padding = "same"
        elif kind in (b"NOTSET", b"VALID") and pads == [kernel // 2] * 4:
            padding = "symmetric"
        if padding is not None:
            return None if is_either else padding
        halves = [(kernel - 2) // 2] * 2 + [(kernel - 1) // 2] * 2
        if kind in (b"NOTSET", b"VALID") and stride == 2 and pads == halves:
            return "same"  # of an image whose sides are even
        raise ValueError(
            f"{node.output[0]!r} is padded by {pads} ({kind.decode(errors='replace')}) around a"
            f" window of {kernel}"
        )

    def _follow_max_pool(self, node: Any) -> str:
        """Return the value after the stem's pool, and note how it is padded."""
        kernel = list(self._graph.attribute(node, "kernel_shape", []))
        stride = self._read_stride(node)
        if (kernel, stride, self._graph.attribute(node, "ceil_mode", 0)) != ([3, 3], 2, 0):
            raise ValueError(
                f"{node.output[0]!r} is not a 3x3 pool of stride 2 that rounds sizes down"
            )
        padding = self._read_padding(node, 3, stride)
        if padding is not None:
            self._paddings.add(padding)
        return str(node.output[0])

    def _follow_block(self, value: str) -> tuple[list[Unit], list[Unit], str]:
        """Return the units of a residual block and of its shortcut, and the value after it."""
        users = self._find_users(value)
        branches = [self._follow_branch(node) for node in users if node.op_type in ("Conv", "Add")]
        sums = {add.output[0] for _, add in branches}
        if len(users) != 2 or len(branches) != 2 or len(sums) != 1:
            raise ValueError(
                f"{value!r} is used by {_join_kinds(users)}, expected two branches that one Add"
                " joins"
            )
        (shortcut, _), (main, add) = sorted(branches, key=lambda branch: len(branch[0]))
        if len(shortcut) > 1 or len(main) not in (2, 3):
            raise ValueError(
                f"a block after {value!r} has branches of {len(main)} and {len(shortcut)}"
                " convolutions"
            )
        self._used.add(add.output[0])
        return main, shortcut, self._take_next(add.output[0], "Relu").output[0]

    def _follow_branch(self, node: Any) -> tuple[list[Unit], Any]:
        """Return the units from a node to the next Add, and this Add."""
        units = []
        while node.op_type == "Conv":
            unit, value = self._read_unit(node)
            units.append(unit)
            node = self._take_next(value, "Relu", "Add")
            if node.op_type == "Relu":
                node = self._take_next(node.output[0], "Conv")
        return units, node

    def _read_head(self, value: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[str, ...]]:
        """Return weight (out, in) and bias of the classifier after the pool, and the values that
        they are in the graph."""
        node = self._take_next(value, *_POOLS)
        self._check_pool(node)
        node = self._take_next(node.output[0], "Gemm", "MatMul", *_RESHAPES)
        while node.op_type in _RESHAPES:
            node = self._take_next(node.output[0], "Gemm", "MatMul", *_RESHAPES)
        weight = self._graph.floats(node.input[1], "the classifier's weight")
        is_transposed = False
        if node.op_type == "Gemm":
            self._check_gemm(node)
            is_transposed = bool(self._graph.attribute(node, "transB", 0))
            biases = list(node.input[2:3])
        else:
            add = self._take_next(node.output[0], "Add")
            biases = [name for name in add.input if name != node.output[0]] or [""]
            if len(biases) > 1:
                raise ValueError(f"{add.output[0]!r} adds something else than a bias")
        weight = weight if is_transposed else weight.T
        bias = np.zeros(len(weight), np.float32)
        if biases:
            bias = self._graph.floats(biases[0], "the classifier's bias")
        if weight.ndim != 2 or bias.size != len(weight):
            raise ValueError(
                f"the classifier has a weight of {list(weight.shape)} and a bias of"
                f" {list(bias.shape)}"
            )
        return (np.ascontiguousarray(weight), bias.reshape(-1)), (node.input[1], *biases)

    def _check_gemm(self, node: Any) -> None:
        """Raise `ValueError` if a classifier scales its terms or transposes its input."""
        factors = []
        for name, default in (("alpha", 1), ("beta", 1), ("transA", 0)):
            factors.append(self._graph.attribute(node, name, default))
        if factors != [1, 1, 0]:
            raise ValueError(
                f"the classifier has alpha, beta and transA {factors}, expected 1, 1 and 0"
            )

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
            numbers = [] if axes is None else np.ravel(axes).tolist()
            places = sorted(axis % 4 for axis in numbers)
            if places != [2, 3]:
                raise ValueError(
                    f"{node.output[0]!r} averages over the axes {places}, expected [2, 3]"
                )

    def _check_complete(self) -> None:
        """Raise `ValueError` if the graph has weights that were not read."""
        nodes = [node for node in self._graph.nodes if node.op_type in _COMPUTING]
        others = [node for node in nodes if node.output[0] not in self._used]
        if others:
            raise ValueError(
                f"it has {len(others)} more nodes with weights, such as {others[0].op_type}"
                f" {others[0].output[0]!r}; results would be wrong without them"
            )


def _join_kinds(nodes: list[Any]) -> str:
    return ", ".join(node.op_type for node in nodes) or "nothing"
