"""Checkpoints of NVIDIA's PaddlePaddle model and other Paddle ResNets: conversion from and to
canonical names and layouts.

The original saves `<--checkpoint-dir>/ResNet50/<epoch>/<--model-prefix>.pdparams` (parameters and
statistics) and `.pdopt` (the optimizer's variables) with paddle.static.save. Epochs count from 0. A
static program names variables by numbering its layers. The order of creation is: the stem, then for
each block its convolutions and its shortcut.

    conv2d_<i>.w_0                                         a kernel, OIHW
    batch_norm_<i>.{w_0,b_0,w_1,w_2}                       scale, bias, running mean and variance
    linear_0.{w_0,b_0}                                     the classifier, [in, out]
    <parameter>_velocity_0                                 velocity of the optimizer Momentum
    <parameter>_fp32_master_0[_velocity_0]                 the same in float32, with --use-pure-fp16

The update is: velocity = momentum * velocity + (gradient + decay * weight); weight -= lr *
velocity. The learning rate is outside the velocity, as in the canonical form, and gradients are
unscaled before the update. Therefore velocities need no conversion. The stem has a fourth input
channel. DALI fills it with zeros, so that its weights have no effect. No step is stored.

`paddle.save(layer.state_dict())` uses the names of layers. All of these models stride in the 3x3:

- The original's code and PaddleClas' ResNet: `stem.0`, `blocks.<i>.conv<j>` and `blocks.<i>.short`,
  with `.conv` and `.bn`.
- PaddleClas' ResNeXt: `conv`, `bb_<stage>_<i>.conv<j>` and `.short`, with `._conv` and
  `._batch_norm`; the classifier is `out`. All numbers count from 0.
- paddle.vision.models: torchvision's names except for `_mean` and `_variance`.

PaddleClas' ResNet18 and ResNet34 have a shortcut with a kernel in their first block, which
torchvision's do not have.

Sources: NVIDIA DeepLearningExamples, PaddlePaddle/Classification/RN50v1.5, models/resnet.py,
utils/save_load.py, config.py; Paddle's static/pir_io.py, optimizer/momentum.py,
vision/models/resnet.py; PaddleClas, ppcls/arch/backbone, legendary_models/resnet.py,
model_zoo/resnext.py.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import Block, Conv, ModelSpec, Tensor, plain_models
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_paddle_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, paddle_pickle
from lockstep.weights.formats.common import (
    FOURTH_CHANNEL,
    Matching,
    Names,
    Shape,
    Writers,
    Written,
    add_layer,
    check_floats,
    check_state,
    choose_model,
    choose_velocities,
    describe_converted,
    describe_other_padding,
    describe_unused,
    find_converted,
    is_stem,
    match_model,
    name_convolutions,
    order_shortcuts_first,
    split_block_name,
    widen_stem,
    write_new,
)
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "Paddle"

_PARAMETERS = ".pdparams"
_OPTIMIZER = ".pdopt"
_FOLDER = "ResNet50"
_MODEL = "resnet50"
_LOGITS = 1000
_VELOCITY = "_velocity_0"
_MASTER = "_fp32_master_0"
_STATIC = {"weight": "w_0", "bias": "b_0", "running_mean": "w_1", "running_var": "w_2"}
_LAYER = {"weight": "weight", "bias": "bias", "running_mean": "_mean", "running_var": "_variance"}
_OF_RUN = re.compile(r"(learning_rate|loss_scaling|num_good_steps|num_bad_steps)_\d+")
"""Variables of the optimizer besides velocities. The recipe sets the learning rate, which is not
used."""
_SCALER = {"loss_scaling": "scale", "num_good_steps": "good_steps", "num_bad_steps": "bad_steps"}
"""Parts of `State.scaler` by variable."""
_MASK = "_asp_mask"
_PROGRAMS = {
    "conv._conv.weight": "PaddleClas",
    "stem.0.conv.weight": "PaddleClas",
    "conv1.weight": "paddle.vision",
}
"""The programs by the name of the stem's kernel. NVIDIA's code saves static programs only, so
layers are PaddleClas'."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file begins as Paddle's do."""
    return paddle_pickle.is_paddle(head)


def find(path: Path) -> Path | None:
    """Return the prefix of the checkpoint that a path names; None if it names none.

    A path is a prefix, one of its files, the folder of an epoch, a folder of such
    folders, or the folder around `ResNet50`. Of several epochs the last one with both files is
    used, as in the original. Raises `CheckpointError` if the path is ambiguous.
    """
    if path.is_dir():
        return _find_prefix(path) or _find_last_epoch(path) or _find_last_epoch(path / _FOLDER)
    prefix = _strip_ending(path)
    if prefix.name and _file(prefix, _PARAMETERS).is_file():
        return prefix
    return None


def _strip_ending(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (_PARAMETERS, _OPTIMIZER) else path


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _find_parameters(place: Path) -> Path:
    """Return the file of parameters that `find` found: that of a prefix, or the place itself."""
    named = _file(place, _PARAMETERS)
    return named if named.is_file() else place


def _find_prefix(folder: Path) -> Path | None:
    files = filter(Path.is_file, folder.glob(f"*{_PARAMETERS}"))
    prefixes = sorted(map(_strip_ending, files))
    if len(prefixes) > 1:
        names = ", ".join(prefix.name for prefix in prefixes)
        raise CheckpointError(f"{folder} has several prefixes: {names}; name one")
    return prefixes[0] if prefixes else None


def _find_last_epoch(folder: Path) -> Path | None:
    epochs = [entry for entry in folder.glob("*") if entry.name.isdecimal() and entry.is_dir()]
    for epoch in sorted(epochs, key=lambda entry: int(entry.name), reverse=True):
        prefix = _find_prefix(epoch)
        if prefix is not None and _file(prefix, _OPTIMIZER).is_file():
            return prefix
    return None


def read(prefix: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet that has a name here. Its variables have the names of a static program or of
    layers.

    `prefix` is what `find` returned. A file with another ending than Paddle's has its optimizer
    next to it under the same name with `.pdopt` added, if it has one.

    Raises `CheckpointError` if it is damaged, incomplete or of another model.
    """
    contents = paddle_pickle.load(_find_parameters(prefix))
    arrays = _mark_bfloat16(contents.arrays)
    matching = _match_model(prefix, arrays)
    table = matching.map_tensors()
    is_rounded = any(arrays[name].dtype != np.float32 for name in table.values())
    optimizer = _read_optimizer(prefix) if momentum or is_rounded else {}
    sources = dict(table)
    slots = {}
    for tensor, name in table.items():
        parameter = contents.parameters.get(name, name)
        if f"{parameter}{_MASTER}" in optimizer:
            sources[tensor] = f"{parameter}{_MASTER}"
        if tensor.is_trained:
            slots[tensor] = _find_slot(parameter, optimizer)
    carried, about = choose_velocities(slots, optimizer, f"*{_VELOCITY}", momentum=momentum)
    stored = optimizer | arrays
    used = {*table.values(), *sources.values(), *slots.values()}
    others = {*stored, *contents.others} - used
    remarks = [*_describe_file(arrays, sources, table), *about]
    remarks += describe_unused(sorted(name for name in others if not _OF_RUN.fullmatch(name)))
    state = State(
        0,
        _convert_arrays(prefix, stored, sources),
        _convert_arrays(prefix, stored, carried),
        scaler=_read_scaler(optimizer) if momentum else {},
    )
    folder = prefix.absolute().parent.name
    epochs = None
    step = "no step is stored"
    if folder.isdecimal():
        epochs = int(folder) + 1
        step += f"; its folder names epoch {folder}, counted from 0"
    if momentum:
        remarks.insert(0, step)
    recipe = resnet50_paddle_90ep().replace(
        model=matching.model, logits=matching.logits, precision="fp32"
    )
    return Weights(
        recipe,
        state,
        (),
        prefix,
        _PROGRAMS.get(matching.names["conv1.weight"], "NVIDIA Paddle"),
        tuple(remarks),
        epochs,
        stored=list_arrays(
            describe_arrays(arrays), zip(state.tensors, table.values(), strict=True)
        ),
    )


def _read_scaler(optimizer: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the loss scale as in `State.scaler`; empty if it is incomplete or not positive."""
    arrays = {}
    for name, value in optimizer.items():
        match = _OF_RUN.fullmatch(name)
        if match and match[1] in _SCALER:
            arrays[match[1]] = value
    if len(arrays) < len(_SCALER):
        return {}
    if any(value.size != 1 or value.dtype.kind not in "iuf" for value in arrays.values()):
        return {}
    scaler = {part: float(arrays[name].item()) for name, part in _SCALER.items()}
    if not 0 < scaler["scale"] < math.inf or not min(scaler.values()) >= 0:
        return {}
    return scaler


def _read_optimizer(prefix: Path) -> dict[str, np.ndarray]:
    path = _file(prefix, _OPTIMIZER)
    if not path.exists():
        return {}
    return _mark_bfloat16(paddle_pickle.load(path).arrays)


def _mark_bfloat16(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays with bfloat16 for uint16, as which Paddle stores its bits."""
    marked = dict(arrays)
    for name, value in arrays.items():
        if value.dtype == np.uint16:
            marked[name] = value.view(BFLOAT16)
    return marked


def _find_slot(parameter: str, optimizer: Mapping[str, np.ndarray]) -> str:
    """Return the name of a parameter's velocity: that of its float32 copy, if there is one."""
    slot = f"{parameter}{_MASTER}{_VELOCITY}"
    return slot if slot in optimizer else f"{parameter}{_VELOCITY}"


def _match_model(prefix: Path, arrays: Mapping[str, np.ndarray]) -> Matching:
    """Return the model that has exactly the tensors that a network would compute with."""
    shapes = {name: value.shape for name, value in arrays.items() if _MASK not in name}
    matchings = [
        match_model(model, names, shapes, _list_shapes)
        for model in plain_models().items()
        for names in _list_tables(model[1], list(shapes))
    ]
    return choose_model(matchings, str(_find_parameters(prefix)), "Paddle", arrays)


def _list_tables(spec: ModelSpec, stored: list[str]) -> Iterator[Names]:
    """Yield the names that a model's tensors may have."""
    # paddle.vision creates a block's shortcut first.
    yield _name_variables(list(spec.list_convolutions()), stored)
    yield _name_variables(order_shortcuts_first(spec), stored)
    numbers = {block.name: i for i, block in enumerate(spec.list_blocks())}

    def name_block(block: Block) -> str:
        return f"blocks.{numbers[block.name]}"

    def name_resnext_block(block: Block) -> str:
        stage, number = split_block_name(block)
        return f"bb_{stage - 1}_{number}"

    scopes = name_convolutions(spec, "stem.0", name_block, ".conv", ".short", begin=0)
    yield _name_layers(scopes, "conv", "bn", "fc")
    scopes = name_convolutions(spec, "conv", name_resnext_block, ".conv", ".short", begin=0)
    yield _name_layers(scopes, "_conv", "_batch_norm", "out")
    table = {"fc.weight": "fc.weight", "fc.bias": "fc.bias"}
    for conv in spec.list_convolutions():
        add_layer(table, conv, f"{conv.name}.weight", _LAYER, f"{conv.bn_name}.")
    yield table


def _name_variables(convs: list[Conv], stored: list[str]) -> Names:
    """Return the names in a static program that creates convolutions in this order."""
    kernels = _number_layers("conv2d", stored, len(convs))
    norms = _number_layers("batch_norm(?:2d)?", stored, len(convs))
    (head,) = _number_layers("linear", stored, 1)
    table = {"fc.weight": f"{head}.w_0", "fc.bias": f"{head}.b_0"}
    for conv, kernel, norm in zip(convs, kernels, norms, strict=True):
        add_layer(table, conv, f"{kernel}.w_0", _STATIC, f"{norm}.")
    return table


def _number_layers(kind: str, stored: list[str], count: int) -> list[str]:
    """Return the first `count` layers of a kind in order. They may begin at any number; missing
    ones follow the last."""
    numbers = set()
    for name in stored:
        if match := re.fullmatch(rf"({kind})_([0-9]{{1,9}})\.\w+", name):
            numbers.add((int(match[2]), match[1]))
    layers = sorted(numbers)[:count]
    last, word = layers[-1] if layers else (-1, kind.partition("(")[0])
    while len(layers) < count:
        last += 1
        layers.append((last, word))
    return [f"{name}_{i}" for i, name in layers]


def _name_layers(scopes: Mapping[Conv, str], kernel: str, norm: str, head: str) -> Names:
    """Return the names of layers in a module, given its scopes and the names below them."""
    table = {"fc.weight": f"{head}.weight", "fc.bias": f"{head}.bias"}
    for conv, scope in scopes.items():
        add_layer(table, conv, f"{scope}.{kernel}.weight", _LAYER, f"{scope}.{norm}.")
    return table


def _list_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    """Return the shapes a tensor may have in a file; the original's shape comes first."""
    if is_stem(tensor):
        return (widen_stem(tensor), tensor.shape)
    if tensor.role == "fc_weight":
        return (tensor.shape[::-1],)
    return (tensor.shape,)


def _convert_arrays(
    prefix: Path, stored: Mapping[str, np.ndarray], names: Mapping[Tensor, str]
) -> dict[str, np.ndarray]:
    """Return variables, or the velocities of variables, as new canonical float32 arrays."""
    converted = {}
    for tensor, name in names.items():
        values = check_floats(f"{prefix}: {name}", stored[name], _list_shapes(tensor))
        if is_stem(tensor):
            values = values[:, : tensor.shape[1]]
        elif tensor.role == "fc_weight":
            values = values.T
        converted[tensor.name] = np.array(values, np.float32, order="C")
    return converted


def _describe_file(
    arrays: Mapping[str, np.ndarray], sources: Mapping[Tensor, str], table: Mapping[Tensor, str]
) -> Iterator[str]:
    for tensor, name in table.items():
        if is_stem(tensor) and arrays[name].shape != tensor.shape:
            yield FOURTH_CHANNEL
    masters = [source for tensor, source in sources.items() if source != table[tensor]]
    if masters:
        yield (
            f"{len(masters)} weights are the float32 copies that the optimizer keeps, such as"
            f" {masters[0]}"
        )
    yield from describe_converted(find_converted(sources.values(), arrays))


def write(prefix: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write a state with the names of the original's static program; return the files and remarks
    on them.

    The stem gets a fourth input channel of zeros, since the original's images have four channels.
    Without momentum no `.pdopt` is written. `into` is as in `write_new`. Raises `CheckpointError`
    if one of the two files exists already.
    """
    prefix = _strip_ending(prefix)
    spec = recipe.spec
    names = _name_variables(list(spec.list_convolutions()), [])
    parameters = {}
    velocities = {}
    for tensor in check_state(spec, recipe.logits, state):
        name = names[tensor.name]
        parameters[name] = _convert_tensor(state.tensors[tensor.name], tensor)
        if tensor.name in state.momentum:
            velocities[f"{name}{_VELOCITY}"] = _convert_tensor(state.momentum[tensor.name], tensor)
    about: tuple[str, ...] = ()
    if velocities:
        # Paddle 3 looks for a scheduled learning rate among the parameters, Paddle 2 among the
        # optimizer's variables.
        rate = {"learning_rate_0": np.zeros(1, np.float32)}
        parameters |= rate
        added = rate | _make_scaler(recipe, state)
        velocities |= added
        about = (f"{', '.join(added)} were added, since programs of Paddle look for them",)
    files = _write_files(prefix, parameters, velocities, into)
    return Written(files, files, tuple(_describe_differences(recipe, state)), about)


def _convert_tensor(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return an array in the original's layout."""
    if is_stem(tensor):
        return np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    return values.T if tensor.role == "fc_weight" else values


def _make_scaler(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    """Return the additional variables that a program with --amp looks for."""
    scaler = {"scale": recipe.loss_scale, "good_steps": 0, "bad_steps": 0} | state.scaler
    return {
        "loss_scaling_0": np.array([scaler["scale"]], np.float32),
        "num_good_steps_0": np.array([scaler["good_steps"]], np.int32),
        "num_bad_steps_0": np.array([scaler["bad_steps"]], np.int32),
    }


def _write_files(
    prefix: Path,
    parameters: dict[str, np.ndarray],
    optimizer: dict[str, np.ndarray],
    into: Path | None,
) -> tuple[Path, ...]:
    """Write a checkpoint. Its parameters are written last: without them it is not a checkpoint."""
    files: Writers = {}
    if optimizer:
        files[_file(prefix, _OPTIMIZER)] = partial(paddle_pickle.dump, arrays=optimizer)
    files[_file(prefix, _PARAMETERS)] = partial(paddle_pickle.dump, arrays=parameters)
    write_new(prefix, files, _file(prefix, _OPTIMIZER), into=into)
    return tuple(reversed(files))


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    yield (
        "the stem has a fourth input channel of zeros, as the original's --image-shape 4,224,224"
        " needs it"
    )
    if recipe.model != _MODEL:
        yield f"the original's code has only the model {_MODEL}; this is another"
    for remark in describe_other_padding(recipe):
        yield f"the original's graph pads symmetrically; {remark}"
    if recipe.logits != _LOGITS:
        yield (
            f"the original's graph has {_LOGITS} outputs; these weights have {recipe.logits}:"
            " --num-of-class"
        )
    if not state.momentum:
        yield (
            "no velocities were written: --from-pretrained-params accepts it, --from-checkpoint"
            " does not"
        )
    if state.step:
        yield (
            f"step {state.step} cannot be stored; the folder's name or --last-epoch-of-checkpoint"
            " sets where to resume"
        )
