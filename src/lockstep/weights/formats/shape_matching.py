"""Recognise a bottleneck ResNet with unknown variable names, by scopes, their order and shapes.

Requirements:

- Names are paths of scopes.
- The variables of a batch norm end in `gamma`, `beta`, `moving_mean` and `moving_variance`.
- A scope holds a kernel and its batch norm, and no other kernel or batch norm.
- The scope of a block holds its three or four convolutions.
- Blocks sorted by the numbers in their names are in the order of computation.

Shapes are TensorFlow's: HWIO. If something does not fit, or fits in two ways, it is an error.
Nothing is guessed.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.models.architectures import ModelSpec
from lockstep.system.errors import RecipeError
from lockstep.system.text import format_count, list_first
from lockstep.weights.formats.common import Names, Shape, add_layer

BATCH_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
"""TensorFlow's suffixes by torchvision's."""
_SHORTCUT = re.compile("shortcut|downsample|proj|skip|identity", re.IGNORECASE)


@dataclass(frozen=True)
class Unit:
    """A convolution and its batch norm."""

    scope: str
    kernel: str
    shape: Shape
    norm: dict[str, str]
    """Variables of the batch norm by torchvision's suffix."""

    @property
    def channels(self) -> tuple[int, int]:
        """Numbers of input channels (of a group) and output channels."""
        return self.shape[2], self.shape[3]


Roles = tuple[Unit, Unit, Unit, Unit | None]
"""The convolutions of a block in order, and that of its shortcut."""


def match(variables: Mapping[str, Shape]) -> tuple[ModelSpec, dict[str, str]]:
    """Return the model that the variables make, and the variable of every canonical tensor. There
    may be other variables.

    Raises `ValueError` that says what is missing or ambiguous.
    """
    if any("/bottleneck_v1/" in name for name in variables):
        raise ValueError(
            "it is TF-Slim's ResNet v1, whose stages have their stride in the last block"
        )
    units = []
    alone = []
    for name, shape in variables.items():
        if len(shape) != 4:
            continue
        unit = _find_unit(name, variables)
        if unit is not None:
            units.append(unit)
        elif not _find_biases(name, variables):
            alone.append(name)
    if alone:
        raise ValueError(
            f"{list_first(sorted(alone), 4)} without all of {', '.join(BATCH_NORM.values())} in a"
            " separate scope"
        )
    stems = [unit for unit in units if unit.shape[:3] == (7, 7, 3)]
    first = _take_only(stems, "one 7x7 convolution of 3 channels")
    units.remove(first)
    blocks = _group_by_block(units)
    channels = first.channels[1]
    parts = [first]
    roles = []
    for scope in sorted(blocks, key=natural):
        roles.append(_assign_roles(scope, blocks[scope], channels))
        channels = roles[-1][2].channels[1]
        parts += filter(None, roles[-1])
    spec = _build_spec(first, roles)
    convs = list(spec.list_convolutions())
    if len(convs) != len(parts):
        raise ValueError(
            f"it has {len(parts)} convolutions, but a model of its widths has {len(convs)}"
        )
    names: Names = {}
    for conv, unit in zip(convs, parts, strict=True):
        add_layer(names, conv, unit.kernel, unit.norm)
    others = dict(variables)
    for name in names.values():
        others.pop(name, None)
    return spec, names | _find_head(others, channels)


def natural(name: str) -> tuple[list[int], list[str]]:
    """Return a sort key that orders names by their numbers first, then by their words.

    >>> sorted(["block_2_1", "block_1_10", "block_1_9", "b1_9"], key=natural)
    ['b1_9', 'block_1_9', 'block_1_10', 'block_2_1']
    """
    return list(map(int, re.findall("[0-9]+", name))), re.split("[0-9]+", name)


def _find_unit(kernel: str, variables: Mapping[str, Shape]) -> Unit | None:
    """Return the unit of a kernel, or None. The innermost scope with a batch norm must hold no
    other kernel or norm."""
    scope = kernel
    while "/" in scope:
        scope = scope.rpartition("/")[0]
        below = [name for name in variables if name.startswith(f"{scope}/")]
        norm = {}
        for suffix, leaf in BATCH_NORM.items():
            norm[suffix] = [name for name in below if name.endswith(f"/{leaf}")]
        if any(norm.values()):
            kernels = [name for name in below if len(variables[name]) == 4]
            if kernels != [kernel] or any(len(names) != 1 for names in norm.values()):
                return None
            variable_names = {suffix: names[0] for suffix, names in norm.items()}
            return Unit(scope, kernel, variables[kernel], variable_names)
    return None


def _take_only(units: list[Unit], what: str) -> Unit:
    if len(units) != 1:
        kernels = [unit.kernel for unit in units]
        raise ValueError(f"expected {what}, found {list_first(kernels, 4) or 'none'}")
    return units[0]


def _group_by_block(units: list[Unit]) -> dict[str, list[Unit]]:
    """Return the units by the scope of their block, which is the scope around the 3x3 convolution's
    scope."""
    grouped: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.shape[:2] == (3, 3):
            grouped[unit.scope.rpartition("/")[0]] = []
    for unit in units:
        around = [scope for scope in grouped if unit.scope.startswith(f"{scope}/")]
        if len(around) != 1:
            raise ValueError(
                f"{unit.kernel} lies in {len(around)} scopes of a block, expected one with one 3x3"
                " convolution"
            )
        grouped[around[0]].append(unit)
    return grouped


def _assign_roles(scope: str, units: list[Unit], inputs: int) -> Roles:
    """Return a block's convolutions in order, and its shortcut's convolution, given the block's
    input channels."""
    large = [unit for unit in units if unit.shape[:2] == (3, 3)]
    middle = _take_only(large, f"one 3x3 convolution in {scope}")
    small = [unit for unit in units if unit.shape[:2] == (1, 1)]
    small.sort(key=lambda unit: natural(unit.scope))
    shapes = [unit.shape for unit in units]
    if len(small) not in (2, 3) or len(units) != len(small) + 1:
        raise ValueError(
            f"{scope} has convolutions of {shapes}, expected 1x1, 3x3, 1x1 and perhaps a shortcut"
        )
    width = middle.channels[1]
    candidates: list[Roles] = []
    for first, last, *rest in itertools.permutations(small):
        shortcut = rest[0] if rest else None
        outputs = last.channels[1]
        around = shortcut.channels if shortcut else (outputs, outputs)
        ends = (first.channels, last.channels[0], around)
        if ends == ((inputs, width), width, (inputs, outputs)):
            candidates.append((first, middle, last, shortcut))
    if len(candidates) > 1:
        candidates = [roles for roles in candidates if _is_named(scope, roles)]
    if len(candidates) != 1:
        why = f"does not take {format_count(inputs, 'channel')}"
        if len(small) == 3:
            why = "does not say by its names which is the shortcut"
        raise ValueError(f"{scope} with convolutions of {shapes} {why}")
    return candidates[0]


def _is_named(scope: str, roles: Roles) -> bool:
    """Return whether the names of a block's convolutions say that they have these roles."""
    first, _, last, shortcut = roles
    if shortcut is not None and not _SHORTCUT.search(shortcut.scope[len(scope) :]):
        return False
    return natural(first.scope) < natural(last.scope)


def _build_spec(first: Unit, roles: list[Roles]) -> ModelSpec:
    """Return the model that consists of these blocks in order. A stage ends where the width
    changes."""
    stages = []
    for _, blocks in itertools.groupby(roles, key=lambda block: block[1].channels[1]):
        stages.append(list(blocks))
    widths = [stage[0][1].channels[1] for stage in stages]
    if len(stages) != 4:
        raise ValueError(
            f"its blocks, in the order of their names, have the widths {widths}, expected"
            " four stages"
        )
    one, two, three, four = map(len, stages)
    middle = stages[0][0][1].channels
    outputs = stages[0][0][2].channels[1]
    try:
        return ModelSpec(
            block="bottleneck",
            layers=(one, two, three, four),
            stem_width=first.channels[1],
            widths=(widths[0], widths[1], widths[2], widths[3]),
            groups=middle[1] // max(middle[0], 1),
            expansion=outputs // max(middle[1], 1),
        )
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _find_head(variables: Mapping[str, Shape], features: int) -> dict[str, str]:
    """Return the classifier's variables: a matrix or 1x1 kernel of the features, and a bias in the
    same scope."""
    pairs = []
    for name, shape in variables.items():
        if shape[:-1] in ((features,), (1, 1, features)):
            pairs += [(name, bias) for bias in _find_biases(name, variables)]
    if len(pairs) != 1:
        kernels = [kernel for kernel, _ in pairs]
        raise ValueError(
            f"expected a classifier of {features} features with its bias, found"
            f" {list_first(kernels, 4) or 'none'}"
        )
    kernel, bias = pairs[0]
    return {"fc.weight": kernel, "fc.bias": bias}


def _find_biases(kernel: str, variables: Mapping[str, Shape]) -> list[str]:
    """Return what may be a kernel's bias: variables in its scope with one value per output, not of
    a batch norm."""
    scope = kernel.rpartition("/")[0]
    biases = []
    for name, shape in variables.items():
        place, _, leaf = name.rpartition("/")
        if place == scope and shape == variables[kernel][-1:] and leaf not in BATCH_NORM.values():
            biases.append(name)
    return biases
