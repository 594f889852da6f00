"""ResNets of Flax, as its example for ImageNet names them: conversion from and to canonical names
and layouts.

The variables of the example's model are two trees:

    params       conv_init/kernel, bn_init/{scale,bias}, Dense_0/{kernel,bias}, and for every block
                 BottleneckResNetBlock_<i>/{Conv_<j>/kernel,BatchNorm_<j>/{scale,bias}}
                 BottleneckResNetBlock_<i>/{conv_proj/kernel,norm_proj/{scale,bias}}
    batch_stats  the batch norms' {mean,var}

Blocks are numbered through all stages; those of two convolutions are called ResNetBlock. Kernels
are HWIO, the classifier is [in, out]. The stride of a block is in its 3x3 convolution. Windows are
padded as TensorFlow's SAME, except that of the stem's convolution: `Recipe.padding` "flax". Batch
norms add 1e-5.

The state of a training has the trees `params` and `batch_stats`, `step`, and Optax's `opt_state`.
The velocities of `optax.sgd` are the tree `trace` in it: velocity = gradient + momentum * velocity;
parameter -= lr * velocity. The gradient includes the weight decay, which is part of the example's
loss. Therefore velocities need no conversion.

In flat files, names are paths such as `params/conv_init/kernel`, also with points between the
parts.

Sources: Flax, examples/imagenet, models.py and train.py; Optax, transforms/_accumulation.py.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights.formats import table
from lockstep.weights.formats.common import Names, Shape
from lockstep.weights.opened_weights import Weights
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

ORIGIN = "Flax"
_STEM = "conv_init/kernel"
_TRACE = "trace/"
_STEP = "step"
_MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""The models of the example that have a name here."""
_EPSILON = 1e-5
_LEAVES = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_AVERAGE = r"(?:\w+_)?(?:ema|averages?|averaged|avg|swa)(?:_\w+)?/"
_OF_TRAINING = (
    (re.compile(f"{_AVERAGE}.*"), math.inf, table.AVERAGE),
    (re.compile("(?:opt_state|optimizer|optimizer_state)/.*"), math.inf, table.OPTIMIZER),
    (re.compile("(?:dynamic_scale|loss_scale)(?:/.*)?"), 1, "of the loss scale"),
    (re.compile(r"(?:\w+_)?(?:rng|key)s?(?:/\w+)?"), 64, "a key of random numbers"),
    (re.compile(r"(?:\w+_)?(?:step|epoch|iteration|seed)s?"), 1, table.COUNTER),
)
"""What a training keeps next to the weights: its place, its largest size, and what it is."""


@dataclass(frozen=True)
class _Places:
    """Where a file has its trees: what the names of their arrays begin with."""

    parameters: str
    statistics: str
    velocities: str
    """Empty if there are none."""

    def explain(self, name: str, shape: Shape) -> str:
        """Return why an array has no effect on inference; "" if it may have one."""
        if self.velocities and name.startswith(self.velocities):
            return table.OPTIMIZER
        around = re.match("(?:.*/)?(?=params/)", self.parameters)
        place = name.removeprefix(around[0] if around else "")
        if place.startswith(("params/", "batch_stats/")):
            return ""
        for known, most, reason in _OF_TRAINING:
            if known.fullmatch(place) and math.prod(shape) <= most:
                return reason
        return ""


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested dicts by their path, `params/conv_init/kernel`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}/{path}": leaf for path, leaf in flatten(value).items()}
        else:
            leaves[name] = value
    return leaves


def are_flax(names: Mapping[str, Any]) -> bool:
    """Return whether arrays have Flax's names: one of them is the kernel of a layer."""
    return any(name.replace(".", "/").rpartition("/")[2] == "kernel" for name in names)


def read_variables(
    path: Path, stored: Mapping[str, Any], *, momentum: bool, choice: WeightsChoice = DEFAULT_CHOICE
) -> Weights:
    """Return the weights of a file's arrays by path, with step and velocities if `momentum` is
    true. Raises `CheckpointError` if they are not a model of the example."""
    own = {name.replace(".", "/"): name for name in stored}
    arrays = {name: value for name, value in stored.items() if isinstance(value, np.ndarray)}
    places = _find_places([name for name in own if not choice.is_ignored(own[name])])

    def list_names(spec: ModelSpec, shapes: table.Shapes) -> Iterator[Names]:
        yield {tensor: own.get(name, name) for tensor, name in name_tensors(spec, places).items()}

    def name_velocity(name: str) -> str:
        place = name.replace(".", "/").removeprefix(places.parameters)
        return own.get(f"{places.velocities}{place}", place)

    format = table.Format(
        program=ORIGIN,
        layout=table.HWIO,
        list_names=list_names,
        explain=lambda name, shape: places.explain(name.replace(".", "/"), shape),
        name_velocity=name_velocity,
        velocities="opt_state/*/trace",
    )
    # A text or nothing at all is not a number to compute with.
    values = [name for name, value in stored.items() if not isinstance(value, str | None)]
    contents = table.Table.of(path, arrays, [name for name in values if name not in arrays])
    recipe = Recipe(padding="flax", bn_epsilon=_EPSILON)
    weights, _ = table.read(contents, format, recipe, choice, momentum=momentum)
    step = _read_step(stored.get(_STEP, 0)) if momentum else 0
    return replace(weights, state=replace(weights.state, step=step))


def _read_step(value: Any) -> int:
    """Return a step, which is a number or an array of one; 0 for anything else."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
        value = value.item()
    return max(value, 0) if type(value) is int else 0


def _find_places(names: Collection[str]) -> _Places:
    """Return where the trees are. Parameters and statistics may be in one. Moving averages are
    only the weights where nothing else is."""
    kernels = [name for name in names if name.endswith(_STEM)]
    velocities = [name.removesuffix(_STEM) for name in kernels if _TRACE in name]
    places = [name.removesuffix(_STEM) for name in kernels if _TRACE not in name]
    trained = [place for place in places if not re.match(f"(?:.*/)?{_AVERAGE}", place)]
    parameters = min(trained or places, key=len, default="params/")
    statistics = re.sub("(^|/)params/", r"\1batch_stats/", parameters, count=1)
    return _Places(parameters, statistics, velocities[0] if velocities else "")


def name_tensors(spec: ModelSpec, places: _Places) -> Names:
    """Return Flax's name of every canonical tensor."""
    block = "BottleneckResNetBlock" if spec.block == "bottleneck" else "ResNetBlock"
    kernels = ("conv_init/kernel", "_{block0}/Conv_{conv0}/kernel", "_{block0}/conv_proj/kernel")
    norms = ("bn_init/", "_{block0}/BatchNorm_{conv0}/", "_{block0}/norm_proj/")
    names = table.name_layers(
        table.name_convolutions(spec, kernels[0], *(block + name for name in kernels[1:])),
        table.name_convolutions(spec, norms[0], *(block + name for name in norms[1:])),
        _LEAVES,
        ("Dense_0/kernel", "Dense_0/bias"),
    )
    return {
        tensor: (places.statistics if ".running_" in tensor else places.parameters) + name
        for tensor, name in names.items()
    }


def build_variables(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    """Return the weights of a state by Flax's paths, in its order. Raises `CheckpointError` if it
    does not fit the recipe's model."""
    names = name_tensors(recipe.spec, _find_places(()))
    weights, _ = table.name_arrays(table.HWIO, names, recipe, state)
    variables = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    return dict(sorted(variables.items(), key=lambda item: item[0].split("/")))


def describe_differences(recipe: Recipe) -> Iterator[str]:
    """Yield how the example's model differs from that of a recipe."""
    if recipe.spec not in map(MODELS.get, _MODELS):
        yield f"Flax's example has only the models {', '.join(_MODELS)}, not this one"
    if recipe.padding != "flax":
        yield (
            "Flax's example pads as SAME, and symmetrically in the stem; these weights were trained"
            f" with {recipe.padding} padding"
        )
    if recipe.bn_epsilon != _EPSILON:
        yield (
            f"batch norms of Flax's example add {_EPSILON} to the variance; these weights were"
            f" trained with {recipe.bn_epsilon}"
        )
