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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import (
    MODELS,
    Block,
    Conv,
    ModelSpec,
    Tensor,
    plain_models,
)
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights.formats.common import (
    Matching,
    Names,
    Shape,
    add_layer,
    check_floats,
    check_state,
    choose_model,
    choose_velocities,
    describe_converted,
    describe_unused,
    find_converted,
    match_model,
    name_convolutions,
)
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

ORIGIN = "Flax"
_PARAMETERS = "params"
_STATISTICS = "batch_stats"
_STEM = "conv_init/kernel"
_TRACE = "trace/"
_STEP = "step"
_MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""The models of the example that have a name here."""
_EPSILON = 1e-5
_TRAINED = {"weight": "scale", "bias": "bias"}
_MOVING = {"running_mean": "mean", "running_var": "var"}


@dataclass(frozen=True)
class _Places:
    """Where a file has its trees: what the names of their arrays begin with."""

    parameters: str
    statistics: str
    velocities: str
    """Empty if there are none."""


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
    path: Path,
    stored: Mapping[str, Any],
    *,
    momentum: bool,
    choice: WeightsChoice = DEFAULT_CHOICE,
) -> Weights:
    """Return the weights of a file's arrays by path, with step and velocities if `momentum` is
    true. Raises `CheckpointError` if they are not a model of the example."""
    names = {name.replace(".", "/"): name for name in stored}
    arrays = {
        name: stored[own] for name, own in names.items() if isinstance(stored[own], np.ndarray)
    }
    places = _find_places(arrays)
    matching = _match_model(path, arrays, places)
    table = matching.map_tensors()
    slots = {
        tensor: f"{places.velocities}{name.removeprefix(places.parameters)}"
        for tensor, name in table.items()
        if tensor.is_trained
    }
    carried, about = choose_velocities(slots, arrays, "opt_state/*/trace", momentum=momentum)
    step = stored.get(_STEP, 0) if momentum else 0
    used = {*table.values(), *slots.values(), _STEP}
    remarks = [
        *describe_converted(find_converted(table.values(), arrays)),
        *about,
        *describe_unused(sorted(names[name] for name in names.keys() - used)),
    ]
    recipe = Recipe(
        model=matching.model,
        logits=matching.logits,
        precision="fp32",
        padding="flax",
        bn_epsilon=_EPSILON,
    )
    state = State(
        _read_step(step),
        _convert_arrays(path, arrays, table),
        _convert_arrays(path, arrays, carried),
    )
    return Weights(
        recipe,
        state,
        (),
        path,
        ORIGIN,
        tuple(remarks),
        stored=list_arrays(
            describe_arrays({names[name]: value for name, value in arrays.items()}),
            ((tensor.name, names[name]) for tensor, name in table.items()),
        ),
    )


def _read_step(value: Any) -> int:
    """Return a step, which is a number or an array of one; 0 for anything else."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
        value = value.item()
    return max(value, 0) if type(value) is int else 0


def _find_places(arrays: Mapping[str, np.ndarray]) -> _Places:
    """Return where the trees are. Parameters and statistics may be in one."""
    kernels = [name for name in arrays if name.endswith(_STEM)]
    velocities = [name for name in kernels if _TRACE in name]
    places = [name.removesuffix(_STEM) for name in kernels if name not in velocities]
    parameters = min(places, key=len, default=f"{_PARAMETERS}/")
    statistics = parameters
    if parameters.startswith(f"{_PARAMETERS}/"):
        statistics = f"{_STATISTICS}/{parameters.removeprefix(f'{_PARAMETERS}/')}"
    return _Places(parameters, statistics, velocities[0].removesuffix(_STEM) if velocities else "")


def _match_model(path: Path, arrays: Mapping[str, np.ndarray], places: _Places) -> Matching:
    """Return the model that has exactly the tensors of the two trees."""
    shapes = {}
    for name, value in arrays.items():
        is_velocity = places.velocities and name.startswith(places.velocities)
        if name.startswith((places.parameters, places.statistics)) and not is_velocity:
            shapes[name] = value.shape
    matchings = (
        match_model(model, name_tensors(model[1], places), shapes, _list_shapes)
        for model in plain_models().items()
    )
    return choose_model(matchings, path, ORIGIN, arrays)


def name_tensors(spec: ModelSpec, places: _Places) -> Names:
    """Return Flax's name of every canonical tensor."""
    numbers = {block.name: i for i, block in enumerate(spec.list_blocks())}
    kind = "BottleneckResNetBlock" if spec.block == "bottleneck" else "ResNetBlock"

    def name_block(block: Block) -> str:
        return f"{kind}_{numbers[block.name]}"

    convs = name_convolutions(spec, "conv_init", name_block, "/Conv_", "/conv_proj", begin=0)
    norms = name_convolutions(spec, "bn_init", name_block, "/BatchNorm_", "/norm_proj", begin=0)
    head = f"{places.parameters}Dense_0"
    table = {"fc.weight": f"{head}/kernel", "fc.bias": f"{head}/bias"}
    for conv, scope in convs.items():
        _add_layer(table, conv, scope, norms[conv], places)
    return table


def _add_layer(table: Names, conv: Conv, scope: str, norm: str, places: _Places) -> None:
    variables = {suffix: f"{places.parameters}{norm}/{leaf}" for suffix, leaf in _TRAINED.items()}
    for suffix, leaf in _MOVING.items():
        variables[suffix] = f"{places.statistics}{norm}/{leaf}"
    add_layer(table, conv, f"{places.parameters}{scope}/kernel", variables)


def _list_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    """Return the shape that a tensor has in a file."""
    if tensor.role == "conv_weight":
        outputs, inputs, height, width = tensor.shape
        return ((height, width, inputs, outputs),)
    return (tensor.shape[::-1],)


def _convert_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], names: Mapping[Tensor, str]
) -> dict[str, np.ndarray]:
    """Return variables, or the velocities of variables, as new canonical float32 arrays."""
    converted = {}
    for tensor, name in names.items():
        values = check_floats(f"{path}: {name}", arrays[name], _list_shapes(tensor))
        if tensor.role == "conv_weight":
            values = values.transpose(3, 2, 0, 1)
        converted[tensor.name] = np.array(
            values.T if tensor.role == "fc_weight" else values, np.float32, order="C"
        )
    return converted


def build_variables(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    """Return the weights of a state by Flax's paths, in its order. Raises `CheckpointError` if it
    does not fit the recipe's model."""
    spec = recipe.spec
    names = name_tensors(spec, _Places(f"{_PARAMETERS}/", f"{_STATISTICS}/", ""))
    variables = {}
    for tensor in check_state(spec, recipe.logits, state):
        values = state.tensors[tensor.name]
        if tensor.role == "conv_weight":
            values = values.transpose(2, 3, 1, 0)
        elif tensor.role == "fc_weight":
            values = values.T
        variables[names[tensor.name]] = np.ascontiguousarray(values, np.float32)
    return dict(sorted(variables.items(), key=lambda item: item[0].split("/")))


def describe_differences(recipe: Recipe) -> Iterator[str]:
    """Yield in what the example's model differs from that of a recipe."""
    if recipe.spec not in map(MODELS.get, _MODELS):
        yield f"Flax's example has only the models {', '.join(_MODELS)}; this is another"
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
