"""A walk through a graph from its images to its classifier, which finds the ResNet in it: `follow`.

If something does not fit, it is an error: `ValueError`, unless another one is documented.
"""

import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lockstep.recipes import Recipe
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.network_head import find_places, follow_head, read_constant, read_norm
from lockstep.weights.formats.resnet_graph import (
    Branches,
    Colour,
    Graph,
    Network,
    Padding,
    Unit,
    build_spec,
    check_units,
    is_same,
    label_node,
    read_axes,
)
from lockstep.weights.original import Takes

_EPSILON = 1e-5
_POOLS = ("GlobalAveragePool", "ReduceMean", "AveragePool")
_ARITHMETIC = ("Sub", "Div", "Mul", "Add")
_PREPARING = ("Conv", "Pad", "Transpose", *_ARITHMETIC, "BatchNormalization", "Gather", "Slice")
"""The first convolution and what may stand before it."""
_NO_PADS = [0] * 4
_AXES = ("images", "channels", "height", "width")
_KERAS_EPSILON = 1.001e-5
_CLOSE = 0.02
"""A mean within this share of ImageNet's shows the order of colours."""
_OF_KERAS = re.compile(r"\bconv[2-5]_block[0-9]+_[0-3]_(conv|bn)(_|\b)")
"""Names of layers of Keras' ResNets."""
KERAS_MEAN = (123.68, 116.779, 103.939)
KERAS_STD = (1.0, 1.0, 1.0)
"""Preprocessing of keras.applications' ResNets, as RGB; their images are BGR."""
KERAS_ASSUMPTION = (
    "its layers are those of Keras' ResNets, so it is assumed that images are as"
    " keras.applications.resnet.preprocess_input prepares them: BGR minus 103.939, 116.779, 123.68;"
    " the stem's input channels were turned to RGB, and the recipe's mean and std are set for that"
)


def follow(graph: Graph) -> Network:
    """Return what a graph computes.

    Raises `ValueError`, `LookupError`, `TypeError` or `RecursionError` if it is not a ResNet.
    """
    return _Walk(graph).follow()


class _Walk:
    """Follows a graph from its input. What is not a ResNet raises `ValueError`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps = 8 * len(graph.nodes) + 8
        self._inner: set[str] = set()
        self._paddings: set[Padding] = set()
        self._remarks: list[str] = []
        self._parts: list[Part] = []
        self._mean = np.zeros(3)
        self._std = np.ones(3)
        self._order = np.arange(3)
        self._range: Literal["bytes", "unit"] | None = None
        """The range of images that a batch norm before the stem was trained with."""
        self._takes_channels_last = False

    def follow(self) -> Network:
        """Return what the graph computes."""
        value = self._follow_preprocessing()
        node, pads = self._take_window(value, "Conv")
        first, value = self._read_unit(node, pads)
        value = self._take_next(value, "Relu").output[0]
        value = self._follow_max_pool(*self._take_window(value, "MaxPool"))
        units = [first]
        branches: list[Branches] = []
        while not any(node.op_type in _POOLS for node in self._find_users(value)):
            main, shortcut, value = self._follow_block(value)
            branches.append((main, shortcut))
            units += [*main, *shortcut]
        pool = self._take_next(value, *_POOLS)
        rank = self._check_pool(pool)
        spec = build_spec(first, branches, pool)
        check_units(spec, units)
        head = follow_head(self._graph, pool.output[0], spec.features, rank, self._inner)
        has_keras_names = self._has_keras_names(units)
        mean, std, takes = self._choose_colours(has_keras_names)
        units[0] = self._turn_stem(first)
        return Network(
            units,
            spec,
            self._choose_padding(units),
            mean,
            std,
            takes not in ("normalised", "bgr"),
            has_keras_names,
            takes,
            self._takes_channels_last,
            self._graph.image_size,
            head,
            (*self._parts, *head.parts),
            (*self._remarks, *head.remarks),
        )

    def _has_keras_names(self, units: list[Unit]) -> bool:
        """Return whether layers have the names of Keras' ResNets, or its epsilon next to biases."""
        if any(unit.epsilon == _KERAS_EPSILON and unit.bias is not None for unit in units):
            return True
        names = (name for node in self._graph.nodes for name in (*node.input, *node.output))
        return any(map(_OF_KERAS.search, map(str, names)))

    def _turn_stem(self, stem: Unit) -> Unit:
        """Return the stem with a kernel for images in RGB and a positive std."""
        kernel = stem.weight
        signs = np.sign(self._std)
        if (signs < 0).any():
            kernel = kernel * signs[:, None, None].astype(np.float32)
        if list(self._order) != [0, 1, 2]:
            kernel = kernel[:, np.argsort(self._order)]
        return stem if kernel is stem.weight else replace(stem, weight=np.ascontiguousarray(kernel))

    def _choose_padding(self, units: list[Unit]) -> Literal[Padding, "flax"]:
        """Return how the windows of the network are padded."""
        stem, *others = (unit.padding for unit in units)
        rest: set[Padding] = self._paddings.union(filter(None, others))
        if (stem, rest) == ("symmetric", {"same"}) and units[0].weight.shape[2] == 7:
            return "flax"
        paddings: set[Padding] = rest.union(filter(None, [stem]))
        if len(paddings) != 1:
            raise ValueError(
                f"its windows are padded in {len(paddings)} ways, expected symmetric, same or flax"
            )
        return paddings.pop()

    def _find_users(self, value: str) -> list[Any]:
        """Return the nodes that compute with a value, behind nodes that change nothing."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError("its nodes form a cycle")
        self._inner.add(value)
        users = []
        for node in self._graph.users.get(value, ()):
            if is_same(self._graph, node):
                users += self._find_users(node.output[0])
            elif node.op_type != "Shape":
                users.append(node)
        return users

    def _take_next(self, value: str, *expected: str) -> Any:
        """Return the only node that uses a value. It must be of an expected type."""
        users = self._find_users(value)
        if len(users) != 1 or users[0].op_type not in expected:
            names = "a convolution, or arithmetic with mean and std,"
            if expected != _PREPARING:
                names = " or ".join(expected)
            raise ValueError(
                f"{value!r:.80} is used by {_join_labels(users)}; a ResNet has {names} there, so"
                " results would differ"
            )
        return users[0]

    def _take_window(self, value: str, kind: str) -> tuple[Any, list[int]]:
        """Return the only node that uses a value, a window, and how a node Pad before it pads."""
        return self._pass_pad(self._take_next(value, kind, "Pad"), kind)

    def _pass_pad(self, node: Any, kind: str) -> tuple[Any, list[int]]:
        """Return a window, and how it is padded before: `node` is the window itself, or Pad."""
        if node.op_type == kind:
            return node, _NO_PADS
        pads = self._read_pad(node)
        return self._take_next(node.output[0], kind), pads

    def _read_pad(self, node: Any) -> list[int]:
        """Return the zeros that a node adds to height and width: top, left, bottom, right."""
        graph = self._graph
        sizes = graph.attribute(node, "pads", None)
        if sizes is None and len(node.input) > 1:
            sizes = graph.constant(node.input[1])
        number = graph.constant(node.input[2]) if "".join(node.input[2:3]) else None
        mode = graph.attribute(node, "mode", b"constant")
        zeros = [] if sizes is None else [int(size) for size in np.ravel(sizes)]
        is_zero = number is None or not number.any()
        if len(zeros) != 8 or any(zeros[i] for i in (0, 1, 4, 5)) or mode != b"constant":
            raise ValueError(f"{label_node(node)} pads differently from a ResNet's windows")
        if not is_zero or graph.attribute(node, "value", 0) or min(zeros) < 0 or node.input[3:]:
            raise ValueError(f"{label_node(node)} pads with numbers other than 0")
        return [zeros[2], zeros[3], zeros[6], zeros[7]]

    # Images

    def _follow_preprocessing(self) -> str:
        """Return the value that the first convolution takes, and note what the nodes before it
        compute."""
        if not self._graph.inputs:
            raise ValueError(
                "it has no input of numbers: it decodes images itself, or computes nothing from"
                " them; export it with an input of decoded images"
            )
        if len(self._graph.inputs) != 1:
            raise ValueError(f"it has the inputs {list(self._graph.inputs)}, expected one: images")
        value = self._graph.inputs[0]
        nodes = []
        while True:
            node = self._take_next(value, *_PREPARING)
            if node.op_type in ("Conv", "Pad"):
                break
            nodes.append(node)
            value = node.output[0]
        transposes = [node for node in nodes if node.op_type == "Transpose"]
        for node in transposes:
            if len(transposes) > 1 or list(self._graph.attribute(node, "perm", [])) != [0, 3, 1, 2]:
                raise ValueError(f"{label_node(node)} transposes images, but not from NHWC to NCHW")
        self._takes_channels_last = bool(transposes)
        for i, node in enumerate(nodes):
            if node.op_type != "Transpose":
                is_last = any(later in transposes for later in nodes[i:])
                self._prepare(node, -1 if is_last else -3)
        return value

    def _prepare(self, node: Any, channel: int) -> None:
        """Fold a node before the first convolution into mean, std and the order of colours."""
        kind = node.op_type
        reason = "into mean and std"
        if kind in ("Gather", "Slice"):
            places = find_places(self._graph, node, 4, channel, 3)
            if places is None or sorted(places.tolist()) != [0, 1, 2]:
                raise ValueError(f"{label_node(node)} selects parts of images other than 3 colours")
            self._mean, self._std = self._mean[places], self._std[places]
            self._order = self._order[places]
            reason = "into the order of the stem's input channels"
        elif kind == "BatchNormalization":
            factors, terms, names = read_norm(self._graph, node, 3)
            self._range = self._read_range(node, *names[2:])
            self._std = self._std / _refuse_zeros(node, factors)
            self._mean = self._mean - terms * self._std
        else:
            self._apply_constant(node, read_constant(self._graph, node, channel, 3))
        self._parts.append(Part(label_node(node), "folded", reason))

    def _read_range(self, node: Any, mean: str, variance: str) -> Literal["bytes", "unit"]:
        """Return the range of images whose mean and variance a batch norm has. Raises `ValueError`
        if neither fits, as for images that were normalised before the graph."""
        means = self._mean + self._graph.floats(mean, "a running mean") * self._std
        deviations = np.sqrt(self._graph.floats(variance, "a running variance")) * np.abs(self._std)
        if means.min() >= 0 and means.max() <= 1 and deviations.max() <= 0.5:
            return "unit"
        if means.min() >= 0 and 1 < means.max() <= 255 and deviations.max() <= 127.5:
            return "bytes"
        numbers = ", ".join(f"{number:.3g}" for number in means)
        raise ValueError(
            f"{label_node(node)} before the first convolution was trained with images whose mean is"
            f" {numbers}, so they are not from 0 to 255 or from 0 to 1, and the file does not say"
            " how they were prepared; export the model with mean and std before this norm"
        )

    def _apply_constant(self, node: Any, constant: tuple[np.ndarray, str, bool] | None) -> None:
        """Note arithmetic of images with a constant."""
        kind = node.op_type
        if constant is None or (kind == "Div" and constant[2]):
            raise ValueError(
                f"{label_node(node)} before the first convolution is not arithmetic of images with"
                " a constant, one number or one a channel"
            )
        numbers, _, is_first = constant
        if kind == "Mul":
            self._std = self._std * np.array(list(map(_invert, _refuse_zeros(node, numbers))))
        elif kind == "Div":
            self._std = self._std * _refuse_zeros(node, numbers)
        elif kind == "Sub" and not is_first:
            self._mean = self._mean + numbers * self._std
        else:
            self._std = -self._std if kind == "Sub" else self._std
            self._mean = self._mean - numbers * self._std

    def _choose_colours(self, has_keras_names: bool) -> tuple[Colour, Colour, Takes]:
        """Return the recipe's mean and std in RGB, and what values the graph takes. Without
        preprocessing in the graph they are those of Keras or of ImageNet."""
        order = np.argsort(self._order)
        mean = self._mean[order]
        std = np.abs(self._std)[order]
        takes: Takes = "bytes"
        if not mean.any() and (std == 1).all() and not self._graph.takes_bytes:
            if has_keras_names:
                self._note_order("BGR")
                self._order = 2 - self._order
                self._remarks.append(KERAS_ASSUMPTION)
                return KERAS_MEAN, KERAS_STD, "bgr"
            self._note_order("RGB")
            default = Recipe()
            return default.mean, default.std, "normalised"
        if mean.max() < 0 and self._range is None and not self._graph.takes_bytes:
            names = " and ".join(part.name for part in self._parts[:4])
            raise ValueError(
                f"{names} before the first convolution expect images whose mean is"
                " below 0, so they are not from 0 to 255 or from 0 to 1, and the file does not say"
                " how they were prepared; export the model with an input of such images"
            )
        is_small = max(*np.abs(mean), *std) <= 1
        if self._range is not None:
            is_small = self._range == "unit"
        if is_small and not self._graph.takes_bytes:
            takes = "unit"
            self._remarks.append(
                "its mean and std are for images from 0 to 1; the recipe's are 255 times as large"
            )
            mean = mean * 255
            std = std * 255
        if np.allclose(mean[::-1], Recipe().mean, rtol=_CLOSE):
            takes = "bgr bytes" if takes == "bytes" else "bgr unit"
            self._order = 2 - self._order
            mean = mean[::-1]
            std = std[::-1]
            self._remarks.append(
                "its mean is that of ImageNet in the order blue, green, red, so its images are BGR;"
                " the stem's input channels were turned to RGB"
            )
        elif not np.allclose(mean, Recipe().mean, rtol=_CLOSE):
            self._note_order("RGB")
        means = (float(mean[0]), float(mean[1]), float(mean[2]))
        return means, (float(std[0]), float(std[1]), float(std[2])), takes

    def _note_order(self, assumed: str) -> None:
        """Add a remark that an order of images is assumed, if the graph changes the order of
        colours."""
        if list(self._order) != [0, 1, 2]:
            self._remarks.append(
                "it changes the order of colours, and its mean does not show the order of images:"
                f" {assumed} is assumed; with the other order, results are wrong"
            )

    def _read_unit(self, node: Any, before: list[int]) -> tuple[Unit, str]:
        """Return the unit of a convolution, whose images are already padded by `before`, and the
        value after it."""
        graph = self._graph
        weight = graph.floats(node.input[1], "a kernel")
        if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
            raise ValueError(
                f"{node.input[1]!r} has the shape {list(weight.shape)}, expected a square kernel"
            )
        biases = list(filter(None, node.input[2:3]))
        bias = graph.floats(biases[0], "a bias") if biases else None
        stride = self._read_stride(node)
        padding = self._read_padding(node, weight.shape[2], stride, before)
        groups = int(graph.attribute(node, "group", 1))
        value = node.output[0]
        after = self._find_users(value)
        norm: tuple[np.ndarray, ...] = ()
        norms: tuple[str, ...] = ()
        epsilon = None
        if len(after) == 1 and after[0].op_type == "BatchNormalization":
            read_norm(graph, after[0], len(weight))
            norms = tuple(after[0].input[1:5])
            norm = tuple(graph.floats(name, "a batch norm's constant") for name in norms)
            # The attribute is a float32; a recipe has the decimal number.
            epsilon = float(str(np.float32(graph.attribute(after[0], "epsilon", _EPSILON))))
            value = after[0].output[0]
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{label_node(node)} does not have a bias for each of its channels")
        constants = (node.input[1], *norms, *biases)
        return Unit(weight, bias, norm, epsilon, stride, groups, padding, constants), value

    def _read_stride(self, node: Any) -> int:
        strides = list(self._graph.attribute(node, "strides", [1, 1]))
        dilations = list(self._graph.attribute(node, "dilations", [1, 1]))
        if len(strides) != 2 or strides[0] != strides[1] or dilations != [1, 1]:
            raise ValueError(f"{label_node(node)} has strides {strides} and dilations {dilations}")
        return int(strides[0])

    def _read_padding(
        self, node: Any, kernel: int, stride: int, before: list[int]
    ) -> Padding | None:
        """Return how a window is padded, also by a node before it; None if both ways are the
        same."""
        kind = self._graph.attribute(node, "auto_pad", b"NOTSET")
        if not isinstance(kind, bytes):
            raise ValueError(f"{label_node(node)} has the auto_pad {kind!r:.60}, expected a string")
        pads = list(self._graph.attribute(node, "pads", _NO_PADS))
        if any(before):
            if kind == b"SAME_UPPER":
                raise ValueError(f"{label_node(node)} is padded twice")
            pads = [sum(sizes) for sizes in zip(before, pads, strict=True)]
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
            f"{label_node(node)} is padded by {pads} ({kind.decode(errors='replace')}) around a"
            f" window of {kernel}"
        )

    def _follow_max_pool(self, node: Any, before: list[int]) -> str:
        """Return the value after the stem's pool, and note how it is padded."""
        kernel = list(self._graph.attribute(node, "kernel_shape", []))
        stride = self._read_stride(node)
        if (kernel, stride, self._graph.attribute(node, "ceil_mode", 0)) != ([3, 3], 2, 0):
            raise ValueError(
                f"{label_node(node)} is not a 3x3 pool of stride 2 that rounds sizes down"
            )
        padding = self._read_padding(node, 3, stride, before)
        if padding is not None:
            self._paddings.add(padding)
        return str(node.output[0])

    def _follow_block(self, value: str) -> tuple[list[Unit], list[Unit], str]:
        """Return the units of a residual block and of its shortcut, and the value after it."""
        users = self._find_users(value)
        convs = [node for node in users if node.op_type in ("Conv", "Pad", "Add")]
        branches = [self._follow_branch(node, value) for node in convs]
        sums = {add.output[0]: add for _, add in branches}
        if len(users) != 2 or len(branches) != 2 or len(sums) != 1:
            raise ValueError(
                f"{value!r:.80} is used by {_join_labels(users)}; a ResNet has two branches there"
                " that one Add joins, or an average pool at its end, so results would differ"
            )
        (shortcut, _), (main, add) = sorted(branches, key=lambda branch: len(branch[0]))
        if len(shortcut) > 1 or len(main) not in (2, 3):
            raise ValueError(
                f"a block after {value!r:.80} has branches of {len(main)} and {len(shortcut)}"
                " convolutions"
            )
        return main, shortcut, self._take_next(add.output[0], "Relu").output[0]

    def _follow_branch(self, node: Any, value: str) -> tuple[list[Unit], Any]:
        """Return the units from a node that uses a value to the next Add, and this Add."""
        units = []
        while node.op_type in ("Conv", "Pad"):
            node, pads = self._pass_pad(node, "Conv")
            unit, value = self._read_unit(node, pads)
            units.append(unit)
            node = self._take_next(value, "Relu", "Add")
            if node.op_type == "Relu":
                value = node.output[0]
                node = self._take_next(value, "Conv", "Pad")
        return units, node

    def _check_pool(self, node: Any) -> int:
        """Return the number of axes after the last pool. Raises `ValueError` if it does not average
        over the whole image."""
        if node.op_type == "ReduceMean":
            places = read_axes(self._graph, node, 4)
            if places != [2, 3]:
                names = " and ".join(_AXES[place] for place in places) or "nothing"
                raise ValueError(
                    f"{label_node(node)} averages over {names}, expected height and width"
                )
            return 4 if self._graph.attribute(node, "keepdims", 1) else 2
        if node.op_type == "AveragePool":
            kernel = list(self._graph.attribute(node, "kernel_shape", []))
            pads = list(self._graph.attribute(node, "pads", _NO_PADS))
            size = self._graph.image_size
            if any(pads) or (size is not None and set(kernel) != {-(-size // 32)}):
                raise ValueError(
                    f"{label_node(node)} averages over windows of {kernel}, padded by {pads},"
                    " expected all of the image"
                )
            self._remarks.append(
                f"its last pool has a fixed size, {kernel}; here it averages over all of the image"
            )
        return 4


def _invert(factor: float) -> float:
    """Return the shortest decimal number whose reciprocal rounds to a float32: 255 for 1 / 255."""
    for digits in range(1, 10):
        number = float(f"{1 / factor:.{digits}g}")
        if np.float32(1 / number) == np.float32(factor):
            return number
    return 1 / factor


def _refuse_zeros(node: Any, numbers: np.ndarray) -> np.ndarray:
    """Return factors. Raises `ValueError` if one is 0."""
    if not numbers.all():
        raise ValueError(f"{label_node(node)} divides or multiplies images by 0")
    return numbers


def _join_labels(nodes: list[Any]) -> str:
    return " and ".join(map(label_node, nodes[:3])) or "nothing"
