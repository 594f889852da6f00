"""Checkpoints of NVIDIA's TensorFlow 1 model: conversion from and to canonical names and layouts,
which docs/reference/checkpoints.md lists.

The dense layers of `bottleneck_se_layer` are squeeze-and-excitation; its model is called
`seresnext101-32x4d` here. Variables are float32, also for runs in mixed precision. Velocities need
no conversion: the learning rate is outside, and the gradient, which includes the weight decay, is
divided by the static loss scale before it is added.

Source: NVIDIA DeepLearningExamples, TensorFlow/Classification/ConvNets, model/resnet.py,
model/blocks, runtime/runner.py. Its code of 2019 (RN50v1.5) has the scope `resnet50_v1.5`, counts
from 1 (stage 3 from 3_2), and pads differently.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import SQUEEZE, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_tensorflow_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import shape_matching, table, tensor_bundle
from lockstep.weights.formats.common import Names, Shape, Written, name_model
from lockstep.weights.formats.shape_matching import BATCH_NORM
from lockstep.weights.formats.tensor_bundle import Bundle
from lockstep.weights.opened_weights import Weights
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "TensorFlow"

_HEAD = "output/dense/kernel"
_STEP = "global_step"
_SLOT = "Momentum"
_SLOTS = re.compile(
    r"(?:(?:Proximal)?(?:Ada(?:m|mW|Max|grad|gradDA|delta)|Nadam|LAMB|LARS|Momentum|RMSProp|Ftrl)"
    r"(?:Optimizer)?|(?:adam|lamb)_[mv]|biased|local_step)(?:_[0-9]+)?"
)
_AVERAGES = re.compile(r"ExponentialMovingAverage(?:_[0-9]+)?")
"""The last words of what a training keeps for a variable: the slots of TensorFlow's optimizers,
parts of the statistics of batch norms, and moving averages."""
_COUNTERS = re.compile(
    r"(?:(?:current_)?loss_scale|(?:good|bad)_steps|beta[12]_power|global_step|learning_rate)"
    r"(?:_[0-9]+)?"
)
_LOGITS = 1001
_OLD_FIRST_BLOCK = "btlnck_block_1_1"
_OF_MODEL: dict[str, dict[str, float]] = {
    "resnet50": {},
    "resnext101-32x4d": {"weight_decay": 1 / 16384},
    "seresnext101-32x4d": {"weight_decay": 1 / 16384},
}
"""NVIDIA's models, and the recipe fields in which their scripts differ."""
_SQUEEZE = "bottleneck_se_layer"
_LAYOUT = {"conv_weight": ("HWIO",), "squeeze": ("IO",), "fc_weight": ("IO", "11IO")}


find = tensor_bundle.find


def name_tensors(spec: ModelSpec) -> Names:
    """Return NVIDIA's name, below the model's scope, of every canonical tensor. The model must have
    bottleneck blocks."""
    inner = "btlnck_block_{stage0}_{number0}/bottleneck_{conv}"
    shortcut = "btlnck_block_{stage0}_{number0}/shortcut/conv2d"
    scopes = table.name_convolutions(spec, "conv2d", inner, shortcut)
    ends = ("/conv2d/kernel", "/BatchNorm/")
    names = table.name_layers(scopes, scopes, BATCH_NORM, (_HEAD, "output/dense/bias"), ends)
    for conv, scope in scopes.items():
        if conv.groups > 1:
            names[f"{conv.name}.weight"] = f"{scope}/bottleneck_2group_filter"
    for block in spec.list_blocks():
        if block.squeeze is not None:
            scope = f"{scopes[block.convs[0]].partition('/')[0]}/{_SQUEEZE}"
            for layer, dense in ((block.squeeze.first, "dense"), (block.squeeze.second, "dense_1")):
                names[f"{layer}.weight"] = f"{scope}/{dense}/kernel"
                names[f"{layer}.bias"] = f"{scope}/{dense}/bias"
    return names


def matches(head: bytes, path: Path) -> bool:
    """Return false: a checkpoint is several files, which are found by their names."""
    return False


def read(prefix: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read the variables of a bottleneck ResNet: by NVIDIA's names below any scope, otherwise by
    their structure.

    Raises `CheckpointError` if it is damaged, incomplete or ambiguous, or if the model has
    additional kernels.
    """
    bundle = Bundle(prefix)
    entries = bundle.entries
    format = table.Format(
        program=NAME,
        layout=_LAYOUT,
        list_models=partial(_list_models, prefix),
        list_names=_list_names,
        explain=partial(_explain, entries),
        name_velocity=lambda name: f"{name}/{_SLOT}",
        velocities=_SLOT,
    )
    types = {name: (entry.dtype_name, entry.shape) for name, entry in entries.items()}
    contents = table.Table(prefix, types, bundle.read)
    weights, names = table.read(contents, format, Recipe(), choice, momentum=momentum)
    recipe = choose_recipe(weights.recipe.spec, weights.recipe.logits)
    return replace(
        weights,
        recipe=recipe,
        state=replace(weights.state, step=_read_step(bundle)),
        origin="NVIDIA TensorFlow",
        remarks=(
            *_describe_structure(recipe.spec, names),
            *_describe_file(recipe.logits, bundle),
            *weights.remarks,
        ),
    )


def _explain(variables: Collection[str], name: str, shape: Shape) -> str:
    """Return why one of the variables has no effect on inference; "" if it may have one."""
    variable, _, leaf = name.rpartition("/")
    if _COUNTERS.fullmatch(leaf) and math.prod(shape) == 1:
        return table.COUNTER
    if variable not in variables:
        return ""
    if _AVERAGES.fullmatch(leaf):
        return table.AVERAGE
    return table.OPTIMIZER if _SLOTS.fullmatch(leaf) else ""


def choose_recipe(spec: ModelSpec, logits: int) -> Recipe:
    """Return the recipe that NVIDIA published for TensorFlow, for a model, in fp32."""
    model = name_model(spec)
    changes = _OF_MODEL.get(model, {}) if isinstance(model, str) else {}
    return resnet50_tensorflow_90ep().replace(
        model=model, logits=logits, precision="fp32", **changes
    )


def _list_models(
    prefix: Path, choice: WeightsChoice, shapes: table.Shapes
) -> Iterator[tuple[str, ModelSpec]]:
    """Yield the chosen network, or else those that the variables make: by NVIDIA's names, and by
    their structure. Raises `CheckpointError` if they make none."""
    if choice.model is not None:
        for name, spec in choice.list_models().items():
            if spec.block == "bottleneck" and {*spec.parts} <= {SQUEEZE}:
                yield name, spec
        return
    is_complete = False
    with suppress(LookupError, ZeroDivisionError, RecipeError):
        scope = _find_scope(shapes)
        spec = _read_spec({name.removeprefix(scope): size for name, size in shapes.items()})
        is_complete = all(scope + name in shapes for name in name_tensors(spec).values())
        yield _name(spec), spec
    try:
        spec, _ = shape_matching.match(_leave_out_slots(shapes))
        yield _name(spec), spec
    except ValueError as error:
        if not is_complete:
            raise CheckpointError(
                f"{prefix} is not a complete ResNet of bottleneck blocks as NVIDIA's TensorFlow"
                f" code saves it: {error}. The first of its {len(shapes)} variables are"
                f" {sorted(shapes)[:3]}."
            ) from None


def _name(spec: ModelSpec) -> str:
    model = name_model(spec)
    return model if isinstance(model, str) else "ResNet"


def _find_scope(shapes: table.Shapes) -> str:
    """Return the scope around the variables of NVIDIA's code; "" if there is none, or several."""
    heads = [name for name in shapes if name == _HEAD or name.endswith(f"/{_HEAD}")]
    return heads[0].removesuffix(_HEAD) if len(heads) == 1 else ""


def _leave_out_slots(shapes: table.Shapes) -> table.Shapes:
    """Return variables without slots of optimizers, also without those of missing variables."""
    return {n: size for n, size in shapes.items() if not _SLOTS.fullmatch(n.rpartition("/")[2])}


def _list_names(spec: ModelSpec, shapes: table.Shapes) -> Iterator[Names]:
    """Yield NVIDIA's names, and those of the variables that make a model."""
    scope = _find_scope(shapes)
    yield {tensor: scope + name for tensor, name in name_tensors(spec).items()}
    with suppress(ValueError):
        same, names = shape_matching.match(_leave_out_slots(shapes))
        if same == replace(spec, stride_in=same.stride_in):
            yield names


def _read_spec(shapes: table.Shapes) -> ModelSpec:
    """Return the model of these variables, by NVIDIA's names. Raises `LookupError`,
    `ZeroDivisionError` or `RecipeError`."""

    stages = [f"btlnck_block_{stage}_" for stage in range(4)]
    blocks = {name.partition("/")[0] for name in shapes}
    depths = [sum(block.startswith(stage) for block in blocks) for stage in stages]
    widths = [shapes[f"{stage}0/bottleneck_1/BatchNorm/gamma"][0] for stage in stages]
    hidden = [shapes.get(f"{stage}0/{_SQUEEZE}/dense/bias", (0,))[0] for stage in stages]
    grouped = shapes.get("btlnck_block_0_0/bottleneck_2/bottleneck_2group_filter")
    outputs = shapes["btlnck_block_0_0/bottleneck_3/BatchNorm/gamma"][0]
    return ModelSpec(
        block="bottleneck",
        layers=tuple(depths),  # type: ignore[arg-type]
        stem_width=shapes["conv2d/BatchNorm/gamma"][0],
        widths=tuple(widths),  # type: ignore[arg-type]
        groups=widths[0] // grouped[2] if grouped else 1,
        expansion=outputs // widths[0],
        squeeze_widths=tuple(hidden),  # type: ignore[arg-type]
    )


def _describe_structure(spec: ModelSpec, variables: Names) -> Iterator[str]:
    """Yield remarks on variables with other names than NVIDIA's."""
    names = name_tensors(spec)
    scopes = Counter(
        variable.removesuffix(names[tensor])
        for tensor, variable in variables.items()
        if variable.endswith(names[tensor])
    )
    scope = max(scopes, key=lambda scope: scopes[scope], default="")
    odd = {tensor: name for tensor, name in variables.items() if name != scope + names[tensor]}
    changes = []
    for tensor, variable in odd.items():
        # A batch norm is listed once, by its scale; the same holds for its other variables.
        scale = f"{tensor.rpartition('.')[0]}.weight"
        if tensor == scale or scale not in odd:
            changes.append(f"{tensor} <- {variable}")
    if changes:
        yield (
            "matched by the order of their scopes and by their shapes, since the names are not"
            f" NVIDIA's: {', '.join(changes)}"
        )
    if any(f"{_OLD_FIRST_BLOCK}/" in variable for variable in odd.values()):
        yield (
            "blocks count from 1, as in NVIDIA's code of 2019, which padded convolutions"
            " symmetrically, but not its pool; Lockstep pads all as TensorFlow's SAME, so the"
            " accuracy may differ"
        )


def _read_step(bundle: Bundle) -> int:
    if _STEP not in bundle.entries:
        return 0
    step = bundle.read(_STEP)
    if step.shape != () or step.dtype.kind != "i" or step < 0:
        raise CheckpointError(
            f"{bundle.prefix}: {_STEP} is {step.tolist()}, expected a number of steps"
        )
    return int(step)


def _describe_file(logits: int, bundle: Bundle) -> Iterator[str]:
    if logits != _LOGITS:
        yield (f"the classifier has {logits} outputs; NVIDIA's has {_LOGITS}, the last unused")
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
            "NVIDIA's TensorFlow layout has bottleneck blocks only, but this network has none"
        )
    scope = recipe.model if isinstance(recipe.model, str) else "resnet"
    if scope == "seresnext101-32x4d":
        scope = "se-resnext101-32x4d"  # as NVIDIA's code calls it
    names = {tensor: f"{scope}/{name}" for tensor, name in name_tensors(spec).items()}
    weights, velocities = table.name_arrays(_LAYOUT, names, recipe, state)
    variables = {_STEP: np.array(state.step, np.int64)} | weights
    variables |= {f"{name}/{_SLOT}": value for name, value in velocities.items()}
    newest = prefix.with_name("checkpoint")
    files = [*tensor_bundle.write(prefix, variables, into)]
    remarks = list(_describe_differences(recipe, state))
    if newest.exists():
        remarks.append(f"{newest} was left as it is; it may name another checkpoint")
    else:
        files.append(tensor_bundle.write_newest(prefix, into))
    return Written(tuple(files), (files[0],), tuple(remarks))


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    if recipe.model not in _OF_MODEL:
        yield f"NVIDIA's code has only the models {', '.join(_OF_MODEL)}, not this one"
    if recipe.padding != "same":
        yield (
            "NVIDIA's graph pads as TensorFlow's SAME; these weights were trained with"
            f" {recipe.padding} padding"
        )
    if recipe.logits != _LOGITS:
        yield f"NVIDIA's graph has {_LOGITS} outputs; these weights have {recipe.logits}"
    if not state.momentum:
        yield (
            "no velocities were written: NVIDIA's code can evaluate and fine-tune from these"
            " weights, but not resume"
        )
    if state.scaler:
        yield "the state of dynamic loss scaling cannot be stored and was left out"
