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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.models.architectures import ModelSpec, blocks, stem
from lockstep.system.errors import RecipeError

Shape = tuple[int, ...]

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


def match(variables: Mapping[str, Shape]) -> tuple[ModelSpec, dict[str, str]]:
    """Return the model that the variables make, and the variable of every canonical tensor. There
    may be other variables.

    Raises `ValueError` that says what is missing or ambiguous.
    """
    kernels = [name for name, shape in variables.items() if len(shape) == 4]
    units = [unit for name in kernels if (unit := _unit(name, variables))]
    alone = (
        set(kernels)
        - {unit.kernel for unit in units}
        - {name for name in kernels if _biases(name, variables)}
    )
    if alone:
        raise ValueError(
            f"{_listed(sorted(alone))} without all of {', '.join(BATCH_NORM.values())} in a"
            " separate scope"
        )
    first = _only(
        [unit for unit in units if unit.shape[:3] == (7, 7, 3)], "one 7x7 convolution of 3 channels"
    )
    grouped = _blocks([unit for unit in units if unit is not first])
    channels = first.channels[1]
    found = []
    for scope in sorted(grouped, key=natural):
        found.append(_roles(scope, grouped[scope], channels))
        channels = found[-1][2].channels[1]
    spec = _spec(first, found)
    convs = [
        stem(spec),
        *(
            conv
            for block in blocks(spec)
            for conv in (*block.convs, block.shortcut)
            if conv is not None
        ),
    ]
    parts = [first, *(unit for block in found for unit in block if unit is not None)]
    if len(convs) != len(parts):
        raise ValueError(
            f"it has {len(parts)} convolutions, but a model of its widths has {len(convs)}"
        )
    names = {}
    for conv, unit in zip(convs, parts, strict=True):
        names[f"{conv.name}.weight"] = unit.kernel
        names |= {f"{conv.bn_name}.{suffix}": variable for suffix, variable in unit.norm.items()}
    used = set(names.values())
    return spec, names | _head(
        {name: shape for name, shape in variables.items() if name not in used}, channels
    )


def natural(name: str) -> tuple[list[int], list[str]]:
    """Return a sort key that orders names by their numbers first, then by their words.

    >>> sorted(["block_2_1", "block_1_10", "block_1_9", "b1_9"], key=natural)
    ['b1_9', 'block_1_9', 'block_1_10', 'block_2_1']
    """
    return [int(number) for number in re.findall("[0-9]+", name)], re.split("[0-9]+", name)


def _unit(kernel: str, variables: Mapping[str, Shape]) -> Unit | None:
    """Return the unit of a kernel, or None. The innermost scope with a batch norm must hold no
    other kernel or norm."""
    scope = kernel
    while "/" in scope:
        scope = scope.rpartition("/")[0]
        below = [name for name in variables if name.startswith(f"{scope}/")]
        norm = {
            suffix: [n for n in below if n.endswith(f"/{leaf}")]
            for suffix, leaf in BATCH_NORM.items()
        }
        if any(norm.values()):
            kernels = [name for name in below if len(variables[name]) == 4]
            alone = kernels == [kernel] and all(len(names) == 1 for names in norm.values())
            return (
                Unit(scope, kernel, variables[kernel], {s: names[0] for s, names in norm.items()})
                if alone
                else None
            )
    return None


def _only(units: list[Unit], what: str) -> Unit:
    if len(units) != 1:
        raise ValueError(f"expected {what}, found {_listed(unit.kernel for unit in units)}")
    return units[0]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "none"


def _blocks(units: list[Unit]) -> dict[str, list[Unit]]:
    """Return the units by the scope of their block, which is the scope around the 3x3 convolution's
    scope."""
    scopes = [unit.scope.rpartition("/")[0] for unit in units if unit.shape[:2] == (3, 3)]
    grouped: dict[str, list[Unit]] = {scope: [] for scope in scopes}
    for unit in units:
        around = [scope for scope in grouped if unit.scope.startswith(f"{scope}/")]
        if len(around) != 1:
            raise ValueError(
                f"{unit.kernel} lies in {len(around)} scopes of a block, expected one with one 3x3"
                " convolution"
            )
        grouped[around[0]].append(unit)
    return grouped


def _roles(scope: str, units: list[Unit], inputs: int) -> tuple[Unit, Unit, Unit, Unit | None]:
    """Return a block's convolutions in order, and its shortcut's convolution, given the block's
    input channels."""
    middle = _only(
        [unit for unit in units if unit.shape[:2] == (3, 3)], f"one 3x3 convolution in {scope}"
    )
    small = sorted(
        (unit for unit in units if unit.shape[:2] == (1, 1)), key=lambda unit: natural(unit.scope)
    )
    if len(small) not in (2, 3) or len(units) != len(small) + 1:
        shapes = [unit.shape for unit in units]
        raise ValueError(
            f"{scope} has convolutions of {shapes}, expected 1x1, 3x3, 1x1 and perhaps a shortcut"
        )
    width = middle.channels[1]
    fitting: list[tuple[Unit, Unit, Unit, Unit | None]] = []
    for first, last, *rest in itertools.permutations(small):
        outputs = last.channels[1]
        around = rest[0].channels if rest else (outputs, outputs)
        if (first.channels, last.channels[0], around) == (
            (inputs, width),
            width,
            (inputs, outputs),
        ):
            fitting.append((first, middle, last, rest[0] if rest else None))
    if len(fitting) > 1:
        named = [
            roles
            for roles in fitting
            if roles[3] is None or _SHORTCUT.search(roles[3].scope[len(scope) :])
        ]
        fitting = [roles for roles in named if natural(roles[0].scope) < natural(roles[2].scope)]
    if len(fitting) != 1:
        why = (
            "does not say by its names which is the shortcut"
            if len(small) == 3
            else f"does not take {inputs} channels"
        )
        raise ValueError(f"{scope} with convolutions of {[unit.shape for unit in units]} {why}")
    return fitting[0]


def _spec(first: Unit, found: list[tuple[Unit, Unit, Unit, Unit | None]]) -> ModelSpec:
    """Return the model that consists of these blocks in order. A stage ends where the width
    changes."""
    stages = [
        list(stage) for _, stage in itertools.groupby(found, key=lambda block: block[1].channels[1])
    ]
    if len(stages) != 4:
        found_widths = [stage[0][1].channels[1] for stage in stages]
        raise ValueError(
            f"its blocks, in the order of their names, have the widths {found_widths}, expected"
            " four stages"
        )
    middle = stages[0][0][1].channels
    one, two, three, four = stages
    widths = (
        one[0][1].channels[1],
        two[0][1].channels[1],
        three[0][1].channels[1],
        four[0][1].channels[1],
    )
    try:
        return ModelSpec(
            block="bottleneck",
            layers=(len(one), len(two), len(three), len(four)),
            stem_width=first.channels[1],
            widths=widths,
            groups=middle[1] // max(middle[0], 1),
            expansion=one[0][2].channels[1] // max(middle[1], 1),
        )
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _head(variables: Mapping[str, Shape], features: int) -> dict[str, str]:
    """Return the classifier's variables: a matrix or 1x1 kernel of the features, and a bias in the
    same scope."""
    found = []
    for name, shape in variables.items():
        if shape[:-1] in ((features,), (1, 1, features)):
            found += [(name, bias) for bias in _biases(name, variables)]
    if len(found) != 1:
        raise ValueError(
            f"expected a classifier of {features} features with its bias, found"
            f" {_listed(n for n, _ in found)}"
        )
    kernel, bias = found[0]
    return {"fc.weight": kernel, "fc.bias": bias}


def _biases(kernel: str, variables: Mapping[str, Shape]) -> list[str]:
    """Return what may be a kernel's bias: variables in its scope with one value per output, not of
    a batch norm."""
    scope = kernel.rpartition("/")[0]
    outputs = variables[kernel][-1:]
    return [
        name
        for name, shape in variables.items()
        if shape == outputs
        and name.rpartition("/")[0] == scope
        and name.rpartition("/")[2] not in BATCH_NORM.values()
    ]
