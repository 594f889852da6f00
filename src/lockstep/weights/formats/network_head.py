"""What a graph computes after the pool of a ResNet, up to its outputs: `follow_head`.

A classifier is a linear function of the pooled features, and softmax makes probabilities of it.
Other linear steps, before it and after it, are folded into its weight and bias: batch norms,
additions and multiplications with constants, and the choice of classes. The logarithm of
probabilities stands for logits, since softmax returns the probabilities. One output of a sigmoid is
two classes with the logits 0 and its own. Any other node raises `ValueError`, with its name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from lockstep.system.text import list_first
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.resnet_graph import Graph, Head, is_same, label_node, read_axes

Kind = Literal["logits", "log_probabilities", "probabilities", "sigmoid", "derived"]
_NO_CLASS = 2**31 - 1
"""The place of a class among names that do not exist."""
_RESHAPES = ("Flatten", "Reshape", "Squeeze")
_LINEAR = ("Gemm", "MatMul", "Conv")
_CHOICES = ("ArgMax", "TopK", "Hardmax")
"""Nodes that only choose among classes."""
_REDUCTION = re.compile("Reduce.*|TensorFlow's (All|Any|Max|Mean|Min|Prod|Sum)")
"""Nodes that make one number of many."""
_SOFTMAX: dict[str, Kind] = {"Softmax": "probabilities", "LogSoftmax": "log_probabilities"}


@dataclass(frozen=True)
class Scores:
    """A value after the pool: a linear function of the features, or what follows from one."""

    width: int
    """Number of columns: features, then classes."""
    rank: int
    """Number of axes: 4 as the pool returns them, 2 after a reshape."""
    is_checked: bool = True
    """Whether the number of columns is sure. After a reshape for a number of images, which may mix
    them, it is that of the classifier's inputs."""
    kind: Kind = "logits"
    matrix: np.ndarray | None = None
    """[width, features]; None: the identity."""
    scale: np.ndarray | None = None
    """[features], what multiplies the features as long as there is no matrix; None: 1."""
    shift: np.ndarray | None = None
    """[width]; None: 0."""
    order: np.ndarray | None = None
    """The outputs of the classifier that the columns are, if they were chosen after it."""
    sources: tuple[tuple[str, str], ...] = ()
    """Pairs of a canonical tensor and a constant that is in it."""
    parts: tuple[Part, ...] = ()

    def multiply(self, factors: np.ndarray) -> Self:
        """Return every column multiplied by a factor; factors are [width] or [1]."""
        shift = None if self.shift is None else self.shift * factors
        if self.matrix is not None:
            matrix = self.matrix * np.broadcast_to(factors, self.width)[:, None]
            return replace(self, matrix=matrix, shift=shift)
        scale = np.broadcast_to(factors if self.scale is None else self.scale * factors, self.width)
        return replace(self, scale=scale, shift=shift)

    def add(self, terms: np.ndarray) -> Self:
        """Return every column with a term, [width] or [1], added."""
        shift = np.broadcast_to(terms if self.shift is None else self.shift + terms, self.width)
        return replace(self, shift=shift)

    def apply(self, matrix: np.ndarray) -> Self:
        """Return the columns multiplied by a matrix [outputs, width]."""
        shift = None if self.shift is None else matrix.astype(np.float64) @ self.shift
        product = matrix
        if self.matrix is not None:
            product = matrix.astype(np.float64) @ self.matrix
        elif self.scale is not None:
            product = matrix * self.scale
        order = None
        if self.matrix is not None:  # mixed classes have no names
            order = np.full(len(matrix), _NO_CLASS)
        changes = {"matrix": product, "scale": None, "shift": shift, "order": order}
        changes["is_checked"] = True
        return replace(self, width=len(matrix), **changes)  # type: ignore[arg-type]

    def take(self, places: np.ndarray) -> Self:
        """Return columns in another order, or some of them."""
        order = places if self.order is None else self.order[places]
        if self.matrix is None:
            return replace(self.apply(np.eye(self.width)[places]), order=None)
        shift = None if self.shift is None else self.shift[places]
        return replace(
            self, width=len(places), matrix=self.matrix[places], shift=shift, order=order
        )


def follow_head(graph: Graph, value: str, features: int, rank: int, inner: set[str]) -> Head:
    """Return the classifier of a graph, given the value after the pool and its number of axes.

    `inner` are the values before it, which a graph may return, too.
    """
    walk = _Walk(graph)
    outputs = walk.follow(value, Scores(features, rank))
    results = {id(scores): scores for scores in outputs.values()}.values()
    finals = [scores for scores in results if scores.kind != "derived"]
    finals = [scores for scores in finals if scores.matrix is not None] or finals
    parts = list(walk.parts)
    for name in graph.outputs:
        if name in inner:
            parts.append(Part(f"output {name!r}", "without effect", "a value inside the network"))
        elif name not in outputs:
            raise ValueError(f"its output {name!r} is not computed by the classifier")
    if walk.unknown and (not finals or finals[0].matrix is None):
        raise ValueError(walk.unknown[0])
    if not finals:
        raise ValueError(
            f"its outputs ({', '.join(map(repr, outputs))}) name only the best classes, without"
            " scores; export the model with its logits or probabilities"
        )
    if any(not _are_equal(finals[0], scores) for scores in finals[1:]):
        raise ValueError(
            f"it returns several results of its classifier: {', '.join(outputs)}; expected one, so"
            " that its classes and probabilities are known"
        )
    output = next(name for name, scores in outputs.items() if scores is finals[0])
    head = _build_head(finals[0], output, parts)
    if not walk.unknown:
        return head
    others = [name for name, scores in outputs.items() if scores.kind == "derived"]
    about = f"reading the output {output!r}, not {', '.join(map(repr, others))}"
    return replace(head, remarks=(*head.remarks, about))


def _are_equal(one: Scores, other: Scores) -> bool:
    """Return whether softmax makes the same probabilities of two results."""
    if (one.kind == "sigmoid") != (other.kind == "sigmoid"):
        return False
    return one.matrix is not None and one.matrix is other.matrix and one.shift is other.shift


def _build_head(scores: Scores, output: str, parts: Sequence[Part]) -> Head:
    """Return the classifier that a result stands for."""
    if scores.matrix is None:
        raise ValueError("it has no classifier after its last pool")
    weight = np.array(scores.matrix, np.float32, order="C")
    shift = np.zeros(scores.width) if scores.shift is None else scores.shift
    bias = np.array(shift, np.float32)
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()) and parts:
        raise ValueError("what follows its classifier cannot be folded into finite numbers")
    remarks = []
    if scores.kind == "sigmoid":
        weight = np.concatenate([np.zeros_like(weight), weight])
        bias = np.concatenate([np.zeros_like(bias), bias])
        scores = replace(scores, order=np.arange(2))
        remarks.append(
            "its one output is a sigmoid, which is read as two classes: class 1 has its"
            " probability, class 0 the rest"
        )
    elif scores.width == 1:
        raise ValueError(
            "its classifier has one output, whose softmax is always 100 %; if its sigmoid is a"
            " probability, export the model with the sigmoid: it is read as two classes"
        )
    folded = [part.name for part in parts if part.treatment == "folded"]
    if folded:
        remarks.append(f"folded into the classifier: {list_first(folded, 5)}")
    return Head(
        weight,
        bias,
        scores.sources,
        output,
        scores.kind,  # type: ignore[arg-type]
        scores.order,
        tuple(parts),
        tuple(remarks),
    )


class _Walk:
    """Follows all values from the pool on."""

    def __init__(self, graph: Graph) -> None:
        self.parts: list[Part] = []
        self.unknown: list[str] = []
        """What is wrong with nodes that must not make the output that is read."""
        self._graph = graph
        self._steps = 8 * len(graph.nodes) + 8

    def follow(self, value: str, scores: Scores) -> dict[str, Scores]:
        """Return the outputs of the graph that a value leads to, with what they are."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError("its nodes form a cycle")
        outputs = {value: scores} if value in self._graph.outputs else {}
        for node in self._graph.users.get(value, ()):
            if node.op_type == "Shape":
                continue
            if is_same(self._graph, node):
                outputs |= self.follow(node.output[0], scores)
                continue
            after = self._compute(node, value, scores)
            for output in filter(None, node.output):
                outputs |= self.follow(output, after)
        return outputs

    def _compute(self, node: Any, value: str, scores: Scores) -> Scores:
        """Return what a node computes from a value."""
        kind = node.op_type
        if scores.kind == "derived" or (kind in _CHOICES and scores.matrix is not None):
            return replace(scores, kind="derived")
        after = None
        if kind in _RESHAPES:
            after = self._reshape(node, scores)
        elif kind in ("Gather", "Slice"):
            after = self._choose(node, scores)
        elif scores.kind == "logits":
            after = self._compute_with_constants(node, value, scores)
        if after is None:
            after = self._normalise(node, scores)
        if after is not None:
            return after
        problem = (
            f"{label_node(node)} follows {_describe(scores)}; a ResNet has only a linear classifier"
            " and softmax there, so results would differ"
        )
        is_result = scores.kind in _SOFTMAX.values() and kind not in _LINEAR
        if not is_result and not _REDUCTION.fullmatch(kind):
            raise ValueError(problem)
        self.unknown.append(problem)
        return replace(scores, kind="derived")

    def _find_channel(self, scores: Scores) -> int:
        """Return the axis of the columns, counted from the end."""
        return -1 if self._graph.channels_last else 1 - scores.rank

    def _reshape(self, node: Any, scores: Scores) -> Scores | None:
        """Return a value with fewer axes. Its columns stay one axis, which the classifier checks
        again."""
        axis = self._graph.attribute(node, "axis", 1)
        if node.op_type == "Squeeze":
            axes = read_axes(self._graph, node, scores.rank)
            channel = self._find_channel(scores) % scores.rank
            if 0 in axes or (channel in axes and scores.width != 1):
                return None
            return replace(scores, rank=scores.rank - len(axes) if axes else 2)
        if node.op_type == "Flatten" and axis not in (1, 1 - scores.rank):
            return None
        shape = [-1, scores.width]
        is_checked = True
        if node.op_type == "Reshape" and len(node.input) > 1:
            constant = self._graph.constant(node.input[1])
            if constant is not None:
                shape = [int(size) for size in np.ravel(constant)]
            is_checked = shape[:1] in ([-1], [0]) or shape[1:] == [scores.width]
            is_checked &= constant is not None
        if scores.matrix is not None and not is_checked:
            return None
        sizes = [size for size in shape[1:] if size != 1]
        if sizes not in ([-1], [0], [scores.width], []) or (not sizes and scores.width != 1):
            return None
        return replace(scores, rank=len(shape), is_checked=is_checked)

    def _choose(self, node: Any, scores: Scores) -> Scores | None:
        """Return chosen columns."""
        channel = self._find_channel(scores)
        places = find_places(self._graph, node, scores.rank, channel, scores.width)
        if places is None or not scores.is_checked or scores.rank < 2:
            return None
        is_permutation = sorted(places.tolist()) == list(range(scores.width))
        if scores.kind not in ("logits", "log_probabilities") and not is_permutation:
            return None
        return self._fold(node, scores.take(places), ())

    def _compute_with_constants(self, node: Any, value: str, scores: Scores) -> Scores | None:
        """Return a linear function of a value."""
        kind = node.op_type
        if kind == "Neg":
            return self._fold(node, scores.multiply(np.array([-1.0])), ())
        if kind == "BatchNormalization":
            factors, terms, names = read_norm(self._graph, node, scores.width)
            sources = [(tensor, name) for name in names for tensor in ("fc.weight", "fc.bias")]
            return self._fold(node, scores.multiply(factors).add(terms), sources)
        if kind in _LINEAR:
            return self._classify(node, value, scores)
        if kind not in ("Add", "Sub", "Mul", "Div"):
            return None
        constant = read_constant(self._graph, node, self._find_channel(scores), scores.width)
        if constant is None:
            return None
        numbers, name, is_first = constant
        both = [("fc.weight", name), ("fc.bias", name)]
        if kind == "Mul":
            return self._fold(node, scores.multiply(numbers), both)
        if kind == "Div":
            is_possible = numbers.all() and not is_first
            return self._fold(node, scores.multiply(1 / numbers), both) if is_possible else None
        if kind == "Sub":
            after = scores.multiply(np.array([-1.0])) if is_first else scores
            return self._fold(node, after.add(numbers if is_first else -numbers), both)
        if scores.shift is None and scores.matrix is not None:  # the bias of a MatMul
            return replace(scores.add(numbers), sources=(*scores.sources, ("fc.bias", name)))
        return self._fold(node, scores.add(numbers), [("fc.bias", name)])

    def _classify(self, node: Any, value: str, scores: Scores) -> Scores | None:
        """Return a value multiplied by a matrix, or by a 1x1 kernel."""
        graph = self._graph
        is_possible = scores.rank == 2 or (scores.rank == 4 and node.op_type != "Gemm")
        if node.input[0] != value or not is_possible:
            return None
        weight = graph.floats(node.input[1], "the classifier's weight")
        factors = [1.0, 1.0]
        if node.op_type == "Conv":
            window = [graph.attribute(node, "group", 1), *graph.attribute(node, "pads", [0] * 4)]
            window += [*weight.shape[2:], *graph.attribute(node, "strides", [1, 1])]
            if weight.ndim != 4 or window != [1, 0, 0, 0, 0, 1, 1, 1, 1] or scores.rank != 4:
                return None
            weight = weight[:, :, 0, 0]
        elif node.op_type == "MatMul" or not graph.attribute(node, "transB", 0):
            weight = weight.T
        if node.op_type == "Gemm":
            factors = [float(graph.attribute(node, name, 1)) for name in ("alpha", "beta")]
            if graph.attribute(node, "transA", 0):
                return None
        if weight.ndim != 2 or weight.shape[1] != scores.width:
            raise ValueError(
                f"{label_node(node)} has a weight of {list(weight.shape)}, expected"
                f" {scores.width} columns"
            )
        after = scores.apply(weight if factors[0] == 1 else weight * np.float64(factors[0]))
        sources = [("fc.weight", node.input[1])]
        for name in filter(None, node.input[2:3]):
            bias = graph.floats(name, "the classifier's bias")
            if bias.size not in (1, after.width) or bias.shape[-1:] not in ((), (bias.size,)):
                raise ValueError(f"{label_node(node)} has a bias of {list(bias.shape)}")
            bias = bias.reshape(-1)
            after = after.add(bias if factors[1] == 1 else bias * np.float64(factors[1]))
            sources.append(("fc.bias", name))
        after = replace(after, sources=(*scores.sources, *sources))
        if scores.matrix is None and factors == [1, 1]:
            return after
        return self._fold(node, after, ())

    def _normalise(self, node: Any, scores: Scores) -> Scores | None:
        """Return what softmax, sigmoid and their logarithms make of a value."""
        kind = node.op_type
        if kind in _SOFTMAX and scores.kind in ("logits", "log_probabilities"):
            channel = self._find_channel(scores)
            axis = self._graph.attribute(node, "axis", -1)
            if axis not in (channel, channel % scores.rank):
                raise ValueError(f"{label_node(node)} sums over axis {axis}, not over the classes")
            return replace(scores, kind=_SOFTMAX[kind])
        if kind == "Log" and scores.kind == "probabilities":
            return replace(scores, kind="log_probabilities")
        if kind == "Exp" and scores.kind == "log_probabilities":
            return replace(scores, kind="probabilities")
        if kind == "Sigmoid" and scores.kind == "logits" and scores.matrix is not None:
            if scores.width == 1:
                return replace(scores, kind="sigmoid")
            raise ValueError(
                f"{label_node(node)} gives each of its {scores.width} outputs an independent"
                " probability, for several labels; Lockstep computes softmax, one label per image"
            )
        return None

    def _fold(self, node: Any, scores: Scores, sources: Sequence[tuple[str, str]]) -> Scores:
        """Return a value after a node that is folded into the classifier."""
        self.parts.append(Part(label_node(node), "folded", "into the classifier"))
        return replace(scores, sources=(*scores.sources, *sources))


def _describe(scores: Scores) -> str:
    names = {
        "logits": "the pooled features" if scores.matrix is None else "the logits",
        "log_probabilities": "the logarithms of probabilities",
        "probabilities": "the probabilities",
        "sigmoid": "the probability",
    }
    return names[scores.kind]


# Nodes with constants, for images and for columns


def read_norm(
    graph: Graph, node: Any, channels: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return factors and terms [channels] of a batch norm as float64, and its constants. Raises
    `ValueError` if it is in training."""
    if graph.attribute(node, "training_mode", 0) or len(node.input) != 5:
        raise ValueError(f"{label_node(node)} normalises by the batch, as in training")
    names = tuple(node.input[1:5])
    scale, shift, mean, variance = (
        graph.floats(name, "a batch norm's constant").astype(np.float64) for name in names
    )
    if {values.shape for values in (scale, shift, mean, variance)} != {(channels,)}:
        raise ValueError(f"{label_node(node)} does not have one value for each of its channels")
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = scale / np.sqrt(variance + np.float64(graph.attribute(node, "epsilon", 1e-5)))
        return factors, shift - mean * factors, names


def read_constant(
    graph: Graph, node: Any, channel: int, channels: int
) -> tuple[np.ndarray, str, bool] | None:
    """Return the constant of a node that adds, subtracts, multiplies or divides, [1] or [channels]
    as float64, its name, and whether it is the first input; None if it is something else.

    `channel` is the axis of the channels, counted from the end: -1 is the last one.
    """
    names = [name for name in node.input if graph.constant(name) is not None]
    if len(node.input) != 2 or len(names) != 1:
        return None
    numbers = graph.floats(names[0], f"the constant of {label_node(node)}")
    axes = [place - numbers.ndim for place, size in enumerate(numbers.shape) if size != 1]
    if numbers.size not in (1, channels) or axes not in ([], [channel]) or numbers.ndim > 4:
        return None
    # The shortest decimal number that rounds to the float32 is the one that a recipe had.
    decimals = np.array([float(str(number)) for number in numbers.ravel()])
    return decimals, names[0], node.input[0] == names[0]


def find_places(graph: Graph, node: Any, rank: int, channel: int, size: int) -> np.ndarray | None:
    """Return which channels, of `size`, a Gather or Slice takes in order; None if it is something
    else. `channel` is as in `read_constant`."""
    channel %= rank
    if node.op_type == "Gather":
        indices = graph.constant(node.input[1])
        axis = graph.attribute(node, "axis", 0) % rank
        if axis != channel or indices is None or (indices.ndim, indices.dtype.kind) != (1, "i"):
            return None
        places = indices.astype(np.int64)
    else:
        places = _slice_places(graph, node, rank, channel, size)
    if not places.size or places.min() < -size or places.max() >= size:
        return None
    return places % size


def _slice_places(graph: Graph, node: Any, rank: int, channel: int, size: int) -> np.ndarray:
    """Return the channels that a Slice takes; none if it also takes a part of other axes."""
    nothing = np.zeros(0, np.int64)
    texts = ("starts", "ends", "axes", "steps")
    values: dict[str, list[int]] = {}
    for place, text in enumerate(texts, start=1):
        constant: Any = graph.attribute(node, text, None)
        if constant is None and place < len(node.input) and node.input[place]:
            constant = graph.constant(node.input[place])
            if constant is None:
                return nothing
        if constant is not None:
            values[text] = [int(number) for number in np.ravel(constant)]
    starts, ends = values.get("starts", []), values.get("ends", [])
    axes = values.get("axes", list(range(len(starts))))
    steps = values.get("steps", [1] * len(starts))
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        return nothing
    places = np.arange(size)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if axis % rank == channel:
            places = places[slice(start, None if step < 0 and end < -size else end, step)]
        elif (start, step) != (0, 1) or end < 2**30:
            return nothing
    return places
