"""One reader and one writer for formats that are tables of names: arrays by name, without a graph.

A `Format` says how the arrays of a network are called, in which order their axes are, and how their
velocities are called. Every array of a file is a tensor of the network, known to have no effect on
inference, or left out by the user. Any other array refuses the file.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.models.architectures import MODELS, Conv, ModelSpec, Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import common, refuse_many
from lockstep.weights.formats.account import Part, check_outputs, split_ignored
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.weights_choice import WeightsChoice

Layout = Mapping[str, tuple[str, ...]]
"""Orders of axes by role; the first one of several is written. The kernels of the stem and of
squeeze-and-excitation may have their own orders, "stem" and "squeeze".

O, I, H and W are the axes of canonical arrays. J is I with one more channel, whose weights have no
effect. 1 is an axis of length 1. Without H and W, a 1x1 kernel is a matrix."""
OIHW: Layout = {"conv_weight": ("OIHW",), "fc_weight": ("OI",)}
HWIO: Layout = {"conv_weight": ("HWIO",), "fc_weight": ("IO",)}
_CANONICAL = "OIHW"

OPTIMIZER = "of the optimizer"
AVERAGE = "a moving average"
COUNTER = "a counter"
"""Why arrays have no effect on inference."""
Shapes = Mapping[str, common.Shape]


@dataclass(frozen=True)
class Table:
    """The contents of a file."""

    path: Path
    arrays: Mapping[str, tuple[str, common.Shape]]
    """Type and shape of each array by name."""
    fetch: Callable[[str], np.ndarray]
    """Reads an array."""
    values: Collection[str] = ()
    """Names of what is not an array, such as numbers."""

    @classmethod
    def of(
        cls, path: Path, arrays: Mapping[str, np.ndarray], values: Collection[str] = ()
    ) -> "Table":
        """Return the contents of a file whose arrays are in memory."""
        types = {name: (dtype, shape) for name, dtype, shape in describe_arrays(arrays)}
        return cls(path, types, arrays.__getitem__, values)


def list_plain_models(choice: WeightsChoice, shapes: Shapes) -> Iterator[tuple[str, ModelSpec]]:
    """Yield the networks that have only torchvision's parts."""
    return ((name, spec) for name, spec in choice.list_models().items() if not spec.parts)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a program names and stores the tensors of a network."""

    program: str
    layout: Layout
    list_names: Callable[[ModelSpec, Shapes], Iterable[common.Names]]
    """Returns the names that the tensors of a network may have in a file with these arrays."""
    explain: Callable[[str, common.Shape], str]
    """Returns why an array has no effect on inference; "" if it may have one."""
    name_velocity: Callable[[str], str] = str
    """Returns the name of the velocity of a parameter."""
    velocities: str = ""
    """What messages call the velocities."""
    find_source: Callable[[str], str] = str
    """Returns the name of the array that has a tensor's values in full precision."""
    list_models: Callable[[WeightsChoice, Shapes], Iterable[tuple[str, ModelSpec]]] = (
        list_plain_models
    )
    """Returns the networks that a file may hold, by name, the first ones with precedence."""


def read(
    table: Table, format: Format, recipe: Recipe, choice: WeightsChoice, *, momentum: bool
) -> tuple[Weights, common.Names]:
    """Return the weights of a file, with velocities if `momentum` is true, and the names in it of
    the network's tensors, in order.

    `recipe` is that of the format; it gets the network. Raises `CheckpointError` if the file is of
    another network, or has arrays that this network does not compute with.
    """
    refuse_many(table.path, len(table.arrays))
    sizes = {name: shape for name, (_, shape) in table.arrays.items()}
    shapes, parts = split_ignored(sizes | dict.fromkeys(table.values, ()), choice)
    variables = dict(shapes)
    listed = dict.fromkeys(table.arrays)
    averages = []
    for name, shape in shapes.items():
        if reason := format.explain(name, shape):
            parts += (Part(name, "without effect", reason),)
            del variables[name]
            listed.pop(name, None)
            if reason == AVERAGE:
                averages.append(name)
    matching = _match(table, format, choice, variables, listed)
    check_outputs(table.path, matching.logits)
    names = matching.map_tensors()
    slots = {}
    sources = {}
    for tensor, name in names.items():
        sources[tensor] = format.find_source(name)
        if tensor.is_trained:
            slots[tensor] = format.name_velocity(name)
    slots, about = common.choose_velocities(slots, shapes, format.velocities, momentum=momentum)
    state = State(0, fetch(table, format.layout, sources), fetch(table, format.layout, slots))
    remarks = [*_describe(table, format.layout, names, sources), *about]
    if averages:
        remarks.append(
            f"{len(averages)} moving averages, such as {averages[0]}, were not used; the weights"
            f" are the trained ones, such as {next(iter(names.values()))}"
        )
    weights = Weights(
        recipe.replace(model=name_network(matching), logits=matching.logits, precision="fp32"),
        state,
        (),
        table.path,
        format.program,
        tuple(remarks),
        parts=parts,
        stored=list_arrays(
            ((name, *table.arrays[name]) for name in listed),
            ((tensor.name, name) for tensor, name in names.items()),
        ),
    )
    return weights, {tensor.name: name for tensor, name in names.items()}


def _match(
    table: Table, format: Format, choice: WeightsChoice, variables: Shapes, listed: Collection[str]
) -> common.Matching:
    """Return the network whose tensors are all of the variables; messages list the arrays."""
    matchings = []
    for model in format.list_models(choice, variables):
        for names in format.list_names(model[1], variables):
            matching = common.match_model(
                model, names, variables, lambda tensor: list_shapes(format.layout, tensor)
            )
            if not matching.problems and not matching.unexpected:
                return matching
            matchings.append(matching)
    if not matchings:
        raise CheckpointError(
            f"{table.path} is a file of {format.program}, which has no network"
            f" {' or '.join(choice.list_models())}; name another --model"
        )
    return common.choose_model(matchings, table.path, format.program, listed)


def name_network(matching: common.Matching) -> str | ModelSpec:
    """Return the name of a model in recipes; its spec if it has none."""
    return matching.model if matching.model in MODELS else common.name_model(matching.spec)


def _describe(
    table: Table, layout: Layout, names: Mapping[Tensor, str], sources: Mapping[Tensor, str]
) -> Iterator[str]:
    """Yield remarks on layouts and types."""
    for tensor, name in names.items():
        order = _find_order(layout, tensor, table.arrays[name][1])
        if "J" in order:
            yield common.FOURTH_CHANNEL
        if "1" in order:
            yield "the classifier is stored as a 1x1 convolution"
    yield from common.describe_converted(
        [name for name in sources.values() if table.arrays[name][0] != "float32"]
    )


def fetch(table: Table, layout: Layout, names: Mapping[Tensor, str]) -> dict[str, np.ndarray]:
    """Return arrays of a file as new canonical float32 arrays."""
    tensors = {}
    for tensor, name in names.items():
        shapes = list_shapes(layout, tensor)
        values = common.check_floats(f"{table.path}: {name}", table.fetch(name), shapes)
        order = _find_order(layout, tensor, values.shape)
        values = values.squeeze(tuple(i for i, axis in enumerate(order) if axis == "1"))
        axes = order.replace("1", "").replace("J", "I")
        values = values.transpose(sorted(range(len(axes)), key=lambda i: _CANONICAL.index(axes[i])))
        if "J" in order:
            values = values[:, :-1]
        tensors[tensor.name] = np.array(values, np.float32, order="C").reshape(tensor.shape)
    return tensors


def name_arrays(
    layout: Layout, names: common.Names, recipe: Recipe, state: State
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the weights of a state and its velocities, both by the names of the weights in a file
    and in its layout. Raises `CheckpointError` if the state does not fit the recipe's model."""
    weights = {}
    velocities = {}
    for tensor in common.check_state(recipe.spec, recipe.logits, state):
        name = names[tensor.name]
        weights[name] = _arrange(layout, tensor, state.tensors[tensor.name])
        if tensor.name in state.momentum:
            velocities[name] = _arrange(layout, tensor, state.momentum[tensor.name])
    return weights, velocities


def _arrange(layout: Layout, tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """Return a canonical array in the order of axes that is written."""
    order = _list_orders(layout, tensor)[0]
    if "J" in order:
        values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    axes = order.replace("1", "").replace("J", "I")
    present = [axis for axis in _CANONICAL if axis in axes]
    values = values.reshape(values.shape[: len(present)])
    return values.transpose([present.index(axis) for axis in axes]).reshape(_measure(order, tensor))


def list_shapes(layout: Layout, tensor: Tensor) -> list[common.Shape]:
    """Return the shapes that a tensor may have in a file, the one that is written first."""
    return [_measure(order, tensor) for order in _list_orders(layout, tensor)]


def _list_orders(layout: Layout, tensor: Tensor) -> tuple[str, ...]:
    kind: str = tensor.role
    if common.is_stem(tensor) and "stem" in layout:
        kind = "stem"
    if kind == "conv_weight" and ".se." in tensor.name and "squeeze" in layout:
        kind = "squeeze"
    return layout.get(kind, ("O",))


def _find_order(layout: Layout, tensor: Tensor, shape: common.Shape) -> str:
    """Return the order of the axes of an array with one of the shapes that its tensor may have."""
    orders = _list_orders(layout, tensor)
    return next(order for order in orders if _measure(order, tensor) == shape)


def _measure(order: str, tensor: Tensor) -> common.Shape:
    sizes = dict(zip(_CANONICAL, tensor.shape, strict=False)) | {"1": 1}
    sizes["J"] = sizes.get("I", 0) + 1
    return tuple(sizes[axis] for axis in order)


def name_convolutions(spec: ModelSpec, stem: str, inner: str, shortcut: str) -> dict[Conv, str]:
    """Return a name for every convolution: of the stem, within a block, and of its shortcut.

    A name may have {stage}, {number} (of a block in its stage) and {conv}, which count from 1, and
    {stage0}, {number0}, {block0} (of a block in the network) and {conv0}, which count from 0. The
    {after} of a block is its stage with the stem as the first one.
    """
    names = {spec.list_stem()[0]: stem}
    for i, block in enumerate(spec.list_blocks()):
        stage, number = map(int, block.name.removeprefix("layer").split("."))
        place = {"block0": i, "stage": stage, "stage0": stage - 1, "after": stage + 1}
        place |= {"number": number + 1, "number0": number}
        for j, conv in enumerate(block.convs):
            names[conv] = inner.format(conv=j + 1, conv0=j, **place)
        if block.shortcut is not None:
            names[block.shortcut] = shortcut.format(**place)
    return names


def name_layers(
    kernels: Mapping[Conv, str],
    norms: Mapping[Conv, str],
    leaves: Mapping[str, str],
    head: tuple[str, str],
    endings: tuple[str, str] = ("", ""),
) -> common.Names:
    """Return the names of all tensors: of kernels, of the variables of batch norms (the start of
    their names, and `leaves` by canonical suffix), and of the classifier. `endings` are added to
    kernels and norms."""
    names = {"fc.weight": head[0], "fc.bias": head[1]}
    for conv, kernel in kernels.items():
        common.add_layer(names, conv, kernel + endings[0], leaves, norms[conv] + endings[1])
    return names
