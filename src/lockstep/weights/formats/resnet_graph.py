"""A ResNet in a graph of nodes, which `network_walk` finds from the images to the classifier.

Names in such graphs may be anything, so the order of nodes and the shapes of their constants
decide. A model is

    [Cast, Transpose, Sub, Div, Mul, Add,     preprocessing, read as the recipe's mean and std, and
     BatchNormalization, Gather]              folded into the stem's kernel
    unit, Relu, MaxPool                       the stem
    unit, Relu, ..., unit, Add, Relu          blocks
    GlobalAveragePool or ReduceMean           or an AveragePool of a fixed size
    Gemm, or MatMul and Add                   the classifier, as `network_head` describes

A unit is Conv and perhaps BatchNormalization. The other input of Add is the block's input, perhaps
after a unit.

A model for inference often has its batch norms folded into its convolutions. Then the canonical
batch norm is the identity apart from its bias: scale 1, running mean 0, and a variance that is 1
together with epsilon.

Every node on a path from the images to an output is one of these. If something does not fit, it is
an error that names the node. Operators and layouts are ONNX's (NCHW, kernels OIHW);
`onnx_graph` and `tensorflow_nodes` give their nodes like this.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.models.architectures import Conv, ModelSpec
from lockstep.recipes import Recipe
from lockstep.recipes.recipe import eval_fields
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.common import name_model
from lockstep.weights.original import Kind, Original, Takes

Padding = Literal["symmetric", "same"]
Colour = tuple[float, float, float]
ROUNDING = ("QuantizeLinear", "DequantizeLinear")
"""Nodes that in pairs round floats to multiples of a scale."""
_EPSILON = 1e-5
FLOAT_TYPES = (1, 10, 11, 16)
"""ONNX's numbers of float, float16, double and bfloat16."""
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
"""What the inputs of a BatchNormalization are, after the values that it normalises."""


@dataclass
class Operator:
    """A node in ONNX's terms."""

    op_type: str
    """An operator of ONNX; or a name of another program, which is refused."""
    input: list[str]
    output: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """Operators and their constants."""

    nodes: Sequence[Any]
    """Each has an operator, `op_type`, and the names of its values: `input`, `output`."""
    inputs: Sequence[str]
    """Names of the inputs that are not constants."""
    outputs: Sequence[str]
    """Names of the values that the graph returns."""
    constants: Mapping[str, np.ndarray]
    places: Mapping[str, str]
    """The names under which a file stores constants, by their names in the graph."""
    channels_last: bool = False
    """Whether constants are added to images and features in the order NHWC."""
    takes_bytes: bool = False
    """Whether the images are integers from 0 to 255."""
    sizes: Sequence[int | None] = ()
    """The fixed sizes of the images: height, width and perhaps 3 for the colours."""
    users: dict[str, list[Any]] = field(init=False)
    """The nodes that use each value, in the order of the graph."""

    def __post_init__(self) -> None:
        self.users = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.input):
                self.users.setdefault(value, []).append(node)

    @property
    def image_size(self) -> int | None:
        """Height and width of the images; None if the graph does not fix them. Raises `ValueError`
        if they differ: Lockstep evaluates squares."""
        sides = sorted({size for size in self.sizes if size is not None and size > 0} - {3})
        if len(sides) > 1:
            raise ValueError(
                f"its images have sides of {sides[0]} and {sides[-1]} pixels, expected squares;"
                " export it for squares, or for any size"
            )
        return sides[0] if sides else None

    def name_users(self) -> dict[str, str]:
        """Return what the first node that uses a value is called in messages, by value."""
        return {value: label_node(nodes[0]) for value, nodes in self.users.items()}

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of a node's attribute."""
        return node.attributes.get(name, default)

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant; None if it is computed from images. Raises `ValueError`."""
        return self.constants.get(name)

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""
        values = self.constant(name)
        if values is None or (values.dtype.kind != "f" and values.dtype.name != "bfloat16"):
            kind = "computed" if values is None else values.dtype
            raise ValueError(
                f"{what} ({name!r:.80}) is {kind}, expected constant floats; export the model"
                " without quantization"
            )
        return np.array(values, np.float32, order="C")

    def place(self, name: str) -> str | None:
        """Return the name under which a file stores a constant; None if it stores none."""
        return self.places.get(name)


def label_node(node: Any) -> str:
    """Return what a node is called in messages: its operator and what it computes."""
    return f"{node.op_type} {node.output[0]!r:.80}"


def is_same(graph: Graph, node: Any) -> bool:
    """Return whether a node changes nothing in inference, apart from rounding."""
    if node.op_type == "Cast":
        return graph.attribute(node, "to", 1) in FLOAT_TYPES
    if node.op_type == "Dropout":
        training = graph.constant(node.input[2]) if "".join(node.input[2:3]) else None
        return training is None or not training.any()
    return node.op_type in ("Identity", *ROUNDING)


def read_axes(graph: Graph, node: Any, rank: int) -> list[int]:
    """Return the axes of a node, sorted and counted from 0; empty if it names none."""
    axes = graph.attribute(node, "axes", None)
    if axes is None and len(node.input) > 1:
        axes = graph.constant(node.input[1])
    return [] if axes is None else sorted(int(axis) % rank for axis in np.ravel(axes))


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


Branches = tuple[list[Unit], list[Unit]]
"""The units of a block and those of its shortcut, of which there are none or one."""


@dataclass(frozen=True)
class Head:
    """The classifier of a graph."""

    weight: np.ndarray
    """float32 [classes, features]."""
    bias: np.ndarray
    """float32 [classes]."""
    sources: tuple[tuple[str, str], ...]
    """Pairs of a canonical tensor and the constant of the graph that is in it."""
    output: str
    """The output of the graph that it is."""
    kind: Kind
    """What this output is."""
    order: np.ndarray | None
    """The outputs of the graph's own classifier that the classes are; None: all, in its order."""
    parts: tuple[Part, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """What a graph computes."""

    units: list[Unit]
    """The stem, then the units of every block in order, its shortcut last."""
    spec: ModelSpec
    padding: Literal[Padding, "flax"]
    mean: Colour
    std: Colour
    normalises: bool
    """Whether the graph says mean and std; otherwise they are ImageNet's."""
    has_keras_names: bool
    """Whether the names are those of Keras' ResNets."""
    takes: Takes
    """What values the graph takes."""
    takes_channels_last: bool
    """Whether the graph takes images as NHWC."""
    image_size: int | None
    """Height and width of the images; None if the graph does not fix them."""
    head: Head
    """The classifier."""
    parts: tuple[Part, ...]
    """What of the graph is more than the network."""
    remarks: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        """What batch norms add to variances. Raises `ValueError` if they add different numbers."""
        values = {unit.epsilon for unit in self.units if unit.epsilon is not None} or {_EPSILON}
        if len(values) > 1:
            raise ValueError(
                f"its batch norms have the epsilons {sorted(values)}, expected one for all"
            )
        return values.pop()

    def build_recipe(self) -> Recipe:
        """Return the default recipe with what the graph has. Raises `ValueError`, `RecipeError`."""
        return Recipe(
            model=name_model(self.spec),
            logits=self.head.bias.size,
            precision="fp32",
            padding=self.padding,
            bn_epsilon=self.epsilon,
            mean=self.mean,
            std=self.std,
            **eval_fields({"image_size": self.image_size}),
        )

    @property
    def stated(self) -> frozenset[str]:
        """The fields of the preprocessing that the graph says."""
        fields = {"mean": self.normalises, "std": self.normalises}
        fields["eval_crop"] = "eval_crop" in eval_fields({"image_size": self.image_size})
        return frozenset(filter(fields.get, fields))

    def build_tensors(self) -> dict[str, np.ndarray]:
        """Return the canonical tensors."""
        values: dict[str, np.ndarray] = {}
        for conv, unit in zip(self.spec.list_convolutions(), self.units, strict=True):
            values |= _build_unit_tensors(conv, unit, self.epsilon)
        return values | {"fc.weight": self.head.weight, "fc.bias": self.head.bias}

    def list_sources(self, graph: Graph) -> Iterator[tuple[str, str]]:
        """Yield every canonical tensor and the name of a stored constant of the graph that it is
        made of."""
        pairs = [*self.head.sources]
        for conv, unit in zip(self.spec.list_convolutions(), self.units, strict=True):
            tensors = [f"{conv.name}.weight", f"{conv.bn_name}.bias"]
            if unit.norm:
                norm = [f"{conv.bn_name}.{suffix}" for suffix in _BATCH_NORM]
                tensors[1:] = [*norm, f"{conv.bn_name}.running_mean"]
            pairs += zip(tensors, unit.constants, strict=False)
        for tensor, value in pairs:
            place = graph.place(value)
            if place is not None:
                yield tensor, place

    def describe_original(
        self, program: str, write: Callable[[Path], None], *, rounds: bool = False
    ) -> Original:
        """Return the network as the program of its file computes it, which reads what `write`
        writes; `rounds` is whether it rounds where Lockstep does not."""
        head = self.head
        return Original(program, write, self.takes, self.takes_channels_last, head.kind, rounds)

    def permute_classes(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the classes that the graph returns, given those of its own
        classifier; none if their number is another one."""
        order = self.head.order
        if order is None:
            return classes if len(classes) <= self.head.bias.size else ()
        return tuple(classes[i] for i in order) if max(order) < len(classes) else ()

    def describe_units(self) -> Iterator[str]:
        """Yield remarks on batch norms and biases."""
        count = sum(not unit.norm for unit in self.units)
        if count:
            yield (
                f"{count} of {len(self.units)} batch norms are folded into their convolutions;"
                " identities replace them"
            )
        if any(unit.norm and unit.bias is not None for unit in self.units):
            yield (
                "biases of convolutions were subtracted from the running means, which is equivalent"
            )


def build_spec(first: Unit, branches: list[Branches], pool: Any) -> ModelSpec:
    """Return the model of a stem and the blocks before a pool. A stage begins where a block has a
    stride, the first one at the first block."""
    starts = []
    for i, (main, _) in enumerate(branches):
        if i == 0 or any(unit.stride != 1 for unit in main):
            starts.append(i)
    if len(starts) != 4:
        raise ValueError(
            f"its {len(branches)} blocks before {label_node(pool)} halve the image in"
            f" {max(len(starts) - 1, 0)} places, expected four stages"
        )
    ends = [*starts[1:], len(branches)]
    one, two, three, four = (end - start for start, end in zip(starts, ends, strict=True))
    widths = [branches[start][0][0].numbers[0] for start in starts]
    main, _ = branches[starts[1]]
    return ModelSpec(
        block="basic" if len(main) == 2 else "bottleneck",
        layers=(one, two, three, four),
        stem_width=first.numbers[0],
        widths=(widths[0], widths[1], widths[2], widths[3]),
        groups=main[1].groups,
        expansion=max(main[-1].numbers[0] // main[0].numbers[0], 1),
        stride_in="1x1" if len(main) == 3 and main[0].stride == 2 else "3x3",
    )


def check_units(spec: ModelSpec, units: list[Unit]) -> None:
    """Raise `ValueError` if the units are not the model's convolutions."""
    convs = list(spec.list_convolutions())
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


def _build_unit_tensors(conv: Conv, unit: Unit, epsilon: float) -> dict[str, np.ndarray]:
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
    tensors = {f"{conv.name}.weight": unit.weight}
    for suffix, value in zip(_BATCH_NORM, (scale, shift, mean, variance), strict=True):
        tensors[f"{conv.bn_name}.{suffix}"] = value
    return tensors
