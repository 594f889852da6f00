"""Checkpoints of NVIDIA's TensorFlow 1 model: conversion from and to canonical names and layouts.

The names below the model's scope (`resnet50/`, `resnext101-32x4d/`) in its model code are:

    conv2d/conv2d/kernel                                             the stem
    btlnck_block_<stage>_<block>/bottleneck_<1|2|3>/conv2d/kernel    both numbers count from 0
    btlnck_block_<stage>_<block>/bottleneck_2/bottleneck_2group_filter
    btlnck_block_<stage>_0/shortcut/conv2d/conv2d/kernel
    <scope of the convolution>/BatchNorm/{gamma,beta,moving_mean,moving_variance}
    btlnck_block_<stage>_<block>/bottleneck_se_layer/{dense,dense_1}/{kernel,bias}
    output/dense/{kernel,bias}

The group filter is that of a grouped convolution (ResNeXt). The dense layers of
`bottleneck_se_layer` are squeeze-and-excitation; its model is called `seresnext101-32x4d` here.

Kernels are HWIO, those of dense layers [in, out]. The classifier is [in, out], or [1, 1, in, out]
if `--use_final_conv` or postprocess_ckpt.py made it a convolution. It has 1001 outputs. Variables
are float32, also for runs in mixed precision.

`<variable>/Momentum` is the velocity of TensorFlow's MomentumOptimizer: accumulator = momentum *
accumulator + gradient; variable -= lr * accumulator. The learning rate is outside the velocity, as
in the canonical form. The gradient includes the weight decay, which is part of the loss, and is
divided by the static loss scale before it is added. Therefore velocities need no conversion.
`global_step` counts optimizer steps.

Source: NVIDIA DeepLearningExamples, TensorFlow/Classification/ConvNets, model/resnet.py,
model/blocks, runtime/runner.py. Its code of 2019 (RN50v1.5) has the scope `resnet50_v1.5`, counts
from 1 (stage 3 from 3_2), and pads differently.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.models.architectures import Block, ModelSpec, Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_tensorflow_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import refuse_existing, refuse_many, structure, tensor_bundle
from lockstep.weights.formats.common import (
    Shape,
    Written,
    add_layer,
    check_floats,
    check_state,
    choose_velocities,
    describe_converted,
    describe_unused,
    name_convolutions,
    name_model,
    redirect_file,
    split_block_name,
)
from lockstep.weights.formats.structure import BATCH_NORM
from lockstep.weights.formats.tensor_bundle import Bundle
from lockstep.weights.opened_weights import Weights, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "TensorFlow"

_HEAD = "output/dense/kernel"
_STEP = "global_step"
_SLOT = "Momentum"
_SLOTS = (_SLOT, "Adam", "Adam_1", "RMSProp", "RMSProp_1", "ExponentialMovingAverage")
_LOGITS = 1001
_OLD_FIRST_BLOCK = "btlnck_block_1_1"
_OF_MODEL: dict[str, dict[str, float]] = {
    "resnet50": {},
    "resnext101-32x4d": {"weight_decay": 1 / 16384},
    "seresnext101-32x4d": {"weight_decay": 1 / 16384},
}
"""The original's models, and the recipe fields in which their scripts differ."""
_SQUEEZE = "bottleneck_se_layer"


@dataclass(frozen=True)
class _Matching:
    spec: ModelSpec
    names: dict[str, str]
    """Variables by canonical name."""
    remarks: tuple[str, ...] = ()


def name_tensors(spec: ModelSpec) -> dict[str, str]:
    """Return NVIDIA's name, below the model's scope, of every canonical tensor. The model must have
    bottleneck blocks."""

    def name_block(block: Block) -> str:
        stage, number = split_block_name(block)
        return f"btlnck_block_{stage - 1}_{number}"

    scopes = name_convolutions(spec, "conv2d", name_block, "/bottleneck_", "/shortcut/conv2d")
    table = {"fc.weight": _HEAD, "fc.bias": "output/dense/bias"}
    for conv, scope in scopes.items():
        kernel = f"{scope}/conv2d/kernel"
        if conv.groups > 1:
            kernel = f"{scope}/{scope.rpartition('/')[2]}group_filter"
        add_layer(table, conv, kernel, BATCH_NORM, f"{scope}/BatchNorm/")
    for block in spec.list_blocks():
        if block.squeeze is not None:
            scope = f"{name_block(block)}/{_SQUEEZE}"
            for layer, dense in ((block.squeeze.first, "dense"), (block.squeeze.second, "dense_1")):
                table[f"{layer}.weight"] = f"{scope}/{dense}/kernel"
                table[f"{layer}.bias"] = f"{scope}/{dense}/bias"
    return table


def matches(head: bytes, path: Path) -> bool:
    """Return false: a checkpoint is several files, which are found by their names."""
    return False


def find(path: Path) -> Path | None:
    """Return what `tensor_bundle.find` returns."""
    return tensor_bundle.find(path)


def read(prefix: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read the variables of a bottleneck ResNet: by NVIDIA's names below any scope, otherwise by
    their structure.

    Raises `CheckpointError` if it is damaged, incomplete or ambiguous, or if the model has
    additional kernels.
    """
    bundle = Bundle(prefix)
    shapes = {name: entry.shape for name, entry in bundle.entries.items()}
    refuse_many(prefix, len(shapes))
    variables = dict(shapes)
    for name in shapes:
        if name == _STEP or _is_slot(name, shapes):
            del variables[name]
    matching = _match_model(prefix, variables)
    table = matching.names
    logits = variables[table["fc.bias"]][0]
    values = {}
    slots = {}
    for tensor in matching.spec.list_tensors(logits):
        name = table[tensor.name]
        values[tensor.name] = _read_tensor(bundle, name, tensor)
        if tensor.is_trained:
            slots[tensor] = f"{name}/{_SLOT}"
    carried, about = choose_velocities(slots, shapes, _SLOT, momentum=momentum)
    velocities = {
        tensor.name: _read_tensor(bundle, slot, tensor) for tensor, slot in carried.items()
    }
    used = {*table.values(), *slots.values(), _STEP}
    remarks = (
        *matching.remarks,
        *_describe_file(variables, table, logits, bundle),
        *about,
        *describe_unused(sorted(shapes.keys() - used)),
    )
    arrays = ((name, bundle.entries[name].dtype_name, shape) for name, shape in variables.items())
    return Weights(
        choose_recipe(matching.spec, logits),
        State(_read_step(bundle), values, velocities),
        (),
        prefix,
        "NVIDIA TensorFlow",
        remarks,
        stored=list_arrays(arrays, table.items()),
    )


def choose_recipe(spec: ModelSpec, logits: int) -> Recipe:
    """Return the recipe that NVIDIA published for TensorFlow, for a model, in fp32."""
    model = name_model(spec)
    changes = _OF_MODEL.get(model, {}) if isinstance(model, str) else {}
    return resnet50_tensorflow_90ep().replace(
        model=model, logits=logits, precision="fp32", **changes
    )


def _is_slot(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Return whether a variable is an optimizer's slot of another. Its last word is enough: the
    other may be missing."""
    variable, _, leaf = name.rpartition("/")
    return variable in shapes or leaf in _SLOTS


def _match_model(prefix: Path, variables: Mapping[str, Shape]) -> _Matching:
    try:
        matching = _match_names(variables) or _match_structure(variables)
        _check_shapes(matching, variables)
    except ValueError as error:
        raise CheckpointError(
            f"{prefix} is not a complete ResNet of bottleneck blocks as NVIDIA's TensorFlow code"
            f" saves it: {error}. The first of its {len(variables)} variables are"
            f" {sorted(variables)[:3]}."
        ) from None
    others = _list_unused_kernels(variables, matching)
    if others:
        raise CheckpointError(
            f"{prefix} has {len(others)} kernels that a plain ResNet does not have, such as"
            f" {others[0]} {variables[others[0]]}: it is another model (squeeze-and-excitation?),"
            " and without them its results would be wrong"
        )
    return matching


def _list_unused_kernels(variables: Mapping[str, Shape], matching: _Matching) -> list[str]:
    """Return the unused variables that the network must have computed with: kernels, matrices."""
    unused = variables.keys() - matching.names.values()
    return sorted(name for name in unused if len(variables[name]) >= 2)


def _match_names(variables: Mapping[str, Shape]) -> _Matching | None:
    """Return the matching if all names below one scope are NVIDIA's and the network has no other
    kernels; else None."""
    heads = [name for name in variables if name == _HEAD or name.endswith(f"/{_HEAD}")]
    if len(heads) != 1:
        return None
    scope = heads[0].removesuffix(_HEAD)
    below = {name: shape for name, shape in variables.items() if name.startswith(scope)}
    try:
        spec = _read_spec({name.removeprefix(scope): shape for name, shape in below.items()})
    except (LookupError, ZeroDivisionError, RecipeError):
        return None
    table = {canonical: scope + name for canonical, name in name_tensors(spec).items()}
    matching = _Matching(spec, table)
    is_complete = variables.keys() >= set(table.values())
    return matching if is_complete and not _list_unused_kernels(variables, matching) else None


def _read_spec(shapes: Mapping[str, Shape]) -> ModelSpec:
    """Return the model of these variables, by NVIDIA's names. Raises `LookupError`,
    `ZeroDivisionError` or `RecipeError`."""

    def depth(stage: int) -> int:
        count = 0
        while f"btlnck_block_{stage}_{count}/bottleneck_1/conv2d/kernel" in shapes:
            count += 1
        return count

    def outputs(scope: str) -> int:
        return shapes[f"{scope}/BatchNorm/gamma"][0]

    def width(stage: int) -> int:
        return outputs(f"btlnck_block_{stage}_0/bottleneck_1")

    def hidden(stage: int) -> int:
        return shapes.get(f"btlnck_block_{stage}_0/{_SQUEEZE}/dense/bias", (0,))[0]

    middle = "btlnck_block_0_0/bottleneck_2"
    grouped = shapes.get(f"{middle}/bottleneck_2group_filter")
    return ModelSpec(
        block="bottleneck",
        layers=(depth(0), depth(1), depth(2), depth(3)),
        stem_width=outputs("conv2d"),
        widths=(width(0), width(1), width(2), width(3)),
        groups=width(0) // grouped[2] if grouped else 1,
        expansion=outputs("btlnck_block_0_0/bottleneck_3") // width(0),
        squeeze_widths=(hidden(0), hidden(1), hidden(2), hidden(3)),
    )


def _match_structure(variables: Mapping[str, Shape]) -> _Matching:
    spec, table = structure.match(variables)
    names = name_tensors(spec)
    scopes = Counter[str]()
    for tensor, variable in table.items():
        if variable.endswith(names[tensor]):
            scopes[variable.removesuffix(names[tensor])] += 1
    scope = max(scopes, key=lambda scope: scopes[scope], default="")
    odd = {tensor: name for tensor, name in table.items() if name != scope + names[tensor]}
    changes = []
    for tensor, variable in odd.items():
        # A batch norm is listed once, by its scale; the same holds for its other variables.
        scale = f"{tensor.rpartition('.')[0]}.weight"
        if tensor == scale or scale not in odd:
            changes.append(f"{tensor} <- {variable}")
    remarks = [
        "matched by the order of their scopes and by their shapes, since the names are not"
        f" NVIDIA's: {', '.join(changes)}"
    ]
    if any(f"{_OLD_FIRST_BLOCK}/" in variable for variable in table.values()):
        remarks.append(
            "blocks count from 1, as in NVIDIA's code of 2019: it padded convolutions"
            " symmetrically, but not its pool; here all are padded as TensorFlow's SAME, so the"
            " accuracy may differ"
        )
    return _Matching(spec, table, tuple(remarks))


def _check_shapes(matching: _Matching, variables: Mapping[str, Shape]) -> None:
    bias = variables[matching.names["fc.bias"]]
    for tensor in matching.spec.list_tensors(bias[0] if bias else 0):
        variable = matching.names[tensor.name]
        shape = variables[variable]
        shapes = _list_shapes(tensor)
        if shape not in shapes:
            raise ValueError(f"{variable} is {list(shape)}, expected {list(shapes[0])}")


def _list_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    """Return the shapes a tensor may have in a file; the original's shape comes first."""
    if _is_dense(tensor):
        return (tensor.shape[1::-1],)
    if tensor.role == "conv_weight":
        outputs, inputs, height, width = tensor.shape
        return ((height, width, inputs, outputs),)
    if tensor.role == "fc_weight":
        return (tensor.shape[::-1], (1, 1, *tensor.shape[::-1]))
    return (tensor.shape,)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a kernel of squeeze-and-excitation."""
    return tensor.role == "conv_weight" and ".se." in tensor.name


def _read_tensor(bundle: Bundle, name: str, tensor: Tensor) -> np.ndarray:
    """Read a variable, or the velocity of one, as a canonical float32 array."""
    shapes = _list_shapes(tensor)
    values = check_floats(f"{bundle.prefix}: {name}", bundle.read(name), shapes)
    if _is_dense(tensor):
        values = values.T.reshape(tensor.shape)
    elif tensor.role == "conv_weight":
        values = values.transpose(3, 2, 0, 1)
    elif tensor.role == "fc_weight":
        values = values.reshape(tensor.shape[::-1]).T
    return np.ascontiguousarray(values, np.float32)


def _read_step(bundle: Bundle) -> int:
    if _STEP not in bundle.entries:
        return 0
    step = bundle.read(_STEP)
    if step.shape != () or step.dtype.kind != "i" or step < 0:
        raise CheckpointError(
            f"{bundle.prefix}: {_STEP} is {step.tolist()}, expected a number of steps"
        )
    return int(step)


def _describe_file(
    variables: Mapping[str, Shape], table: Mapping[str, str], logits: int, bundle: Bundle
) -> Iterator[str]:
    if logits != _LOGITS:
        yield (
            f"the classifier has {logits} outputs; the original has {_LOGITS}, of which the last is"
            " unused"
        )
    if len(variables[table["fc.weight"]]) == 4:
        yield "the classifier is stored as a 1x1 convolution"
    entries = bundle.entries
    yield from describe_converted(
        [name for name in table.values() if entries[name].dtype != tensor_bundle.FLOAT32]
    )
    if _STEP not in bundle.entries:
        yield f"there is no {_STEP}; step 0 is used"


def write(prefix: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write a state with NVIDIA's names; return the files and remarks on them.

    Names depend only on the model, not on its padding and logits. Without momentum no slots are
    written. The file `checkpoint`, which names a folder's newest checkpoint, is written if there is
    none. `into` is as in `write_new`. Raises `CheckpointError` if a file exists already or the
    model has no bottleneck blocks.
    """
    spec = recipe.spec
    if spec.block != "bottleneck":
        raise CheckpointError(
            f"NVIDIA's TensorFlow layout has bottleneck blocks only, but {recipe.model} has none"
        )
    scope = recipe.model if isinstance(recipe.model, str) else "resnet"
    if scope == "seresnext101-32x4d":
        scope = "se-resnext101-32x4d"  # as the original calls it
    table = name_tensors(spec)
    variables = {_STEP: np.array(state.step, np.int64)}
    for tensor in check_state(spec, recipe.logits, state):
        name = f"{scope}/{table[tensor.name]}"
        variables[name] = _convert_tensor(state.tensors[tensor.name], tensor)
        if tensor.name in state.momentum:
            variables[f"{name}/{_SLOT}"] = _convert_tensor(state.momentum[tensor.name], tensor)
    index = tensor_bundle.index_path(prefix)
    newest = prefix.with_name("checkpoint")
    files = [index, tensor_bundle.data_path(prefix, 0, 1)]
    refuse_existing(*files)
    tensor_bundle.write(redirect_file(prefix, into), variables)
    remarks = list(_describe_differences(recipe, state))
    if newest.exists():
        remarks.append(f"{newest} was left as it is; it may name another checkpoint")
    else:
        tensor_bundle.write_newest(redirect_file(prefix, into))
        files.append(newest)
    return Written(tuple(files), (index,), tuple(remarks))


def _convert_tensor(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return an array in TensorFlow's layout, as a view."""
    if _is_dense(tensor):
        return values[:, :, 0, 0].T
    if tensor.role == "conv_weight":
        return values.transpose(2, 3, 1, 0)
    return values.T if tensor.role == "fc_weight" else values


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    if recipe.model not in _OF_MODEL:
        yield f"the original's code has only the models {', '.join(_OF_MODEL)}; this is another"
    if recipe.padding != "same":
        yield (
            "the original's graph pads as TensorFlow's SAME; these weights were trained with"
            f" {recipe.padding} padding"
        )
    if recipe.logits != _LOGITS:
        yield f"the original's graph has {_LOGITS} outputs; these weights have {recipe.logits}"
    if not state.momentum:
        yield (
            "no velocities were written: the original can evaluate and fine-tune from it, but not"
            " resume"
        )
    if state.scaler:
        yield "the state of dynamic loss scaling cannot be stored and was left out"
