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
    <parameter>_fp32_master_0, <parameter>_fp32_master_0_velocity_0     with --use-pure-fp16, which rounds the parameter

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import (
    MODELS,
    Conv,
    ModelSpec,
    Tensor,
    blocks,
    convolutions,
    model_spec,
    stem,
    tensors,
)
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_paddle_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, dtype_name, numbers, paddle_pickle
from lockstep.weights.formats.common import (
    FOURTH_CHANNEL,
    Matching,
    Names,
    Shape,
    Writers,
    Written,
    check_state,
    choose_model,
    describe_missing_velocities,
    describe_unused,
    is_stem,
    match_model,
    order_shortcuts_first,
    write_new,
)
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays

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
_OF_OPTIMIZER = re.compile(r"(learning_rate|loss_scaling|num_good_steps|num_bad_steps)_\d+")
"""Variables of the optimizer besides velocities. The recipe sets the learning rate, which is not
used."""
_SCALER = {"loss_scaling": "scale", "num_good_steps": "good_steps", "num_bad_steps": "bad_steps"}
"""Parts of `State.scaler` by variable."""
_MASK = "_asp_mask"


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
        return _in_folder(path) or _of_epochs(path) or _of_epochs(path / _FOLDER)
    prefix = _prefix(path)
    if prefix.name and _file(prefix, _PARAMETERS).is_file():
        return prefix
    return None


def _prefix(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (_PARAMETERS, _OPTIMIZER) else path


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _parameters(place: Path) -> Path:
    """Return the file of parameters that `find` found: that of a prefix, or the place itself."""
    named = _file(place, _PARAMETERS)
    return named if named.is_file() else place


def _in_folder(folder: Path) -> Path | None:
    found = sorted(_prefix(file) for file in folder.glob(f"*{_PARAMETERS}") if file.is_file())
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has several prefixes: {', '.join(prefix.name for prefix in found)}; name one"
        )
    return found[0] if found else None


def _of_epochs(folder: Path) -> Path | None:
    epochs = [entry for entry in folder.glob("*") if entry.name.isdecimal() and entry.is_dir()]
    for epoch in sorted(epochs, key=lambda entry: int(entry.name), reverse=True):
        prefix = _in_folder(epoch)
        if prefix is not None and _file(prefix, _OPTIMIZER).is_file():
            return prefix
    return None


def read(prefix: Path, *, momentum: bool = True) -> Weights:
    """Read a ResNet that has a name here. Its variables have the names of a static program or of
    layers.

    `prefix` is what `find` returned. A file with another ending than Paddle's has its optimizer
    next to it under the same name with `.pdopt` added, if it has one.

    Raises `CheckpointError` if it is damaged, incomplete or of another model.
    """
    contents = paddle_pickle.load(_parameters(prefix))
    arrays = _typed(contents.arrays)
    matching = _matched(prefix, arrays)
    table = {
        tensor: matching.names[tensor.name]
        for tensor in tensors(MODELS[matching.model], matching.logits)
    }
    rounded = any(arrays[name].dtype != np.float32 for name in table.values())
    optimizer = _of_optimizer(prefix) if momentum or rounded else {}
    stored = optimizer | arrays
    parameters = {tensor: contents.parameters.get(name, name) for tensor, name in table.items()}
    masters = {tensor: f"{parameter}{_MASTER}" for tensor, parameter in parameters.items()}
    sources = table | {tensor: master for tensor, master in masters.items() if master in optimizer}
    slots = {
        tensor: _slot(name, optimizer) for tensor, name in parameters.items() if tensor.is_trained
    }
    missing = [slot for slot in slots.values() if slot not in optimizer]
    carried = slots if momentum and not missing else {}
    used = {*table.values(), *sources.values(), *slots.values()}
    others = (
        name
        for name in (*stored, *contents.others)
        if name not in used and not _OF_OPTIMIZER.fullmatch(name)
    )
    remarks = (
        *([_about_step(prefix)] if momentum else []),
        *_remarks(arrays, sources, table),
        *(describe_missing_velocities(missing, len(slots), f"*{_VELOCITY}") if momentum else ()),
        *describe_unused(sorted(others)),
    )
    found, velocities = (
        {tensor.name: _canonical(prefix, stored, name, tensor) for tensor, name in names.items()}
        for names in (sources, carried)
    )
    recipe = resnet50_paddle_90ep().replace(
        model=matching.model, logits=matching.logits, precision="fp32"
    )
    folder = prefix.absolute().parent.name
    epochs = int(folder) + 1 if folder.isdecimal() else None
    state = State(0, found, velocities, scaler=_scaler(optimizer) if momentum else {})
    held = list_arrays(
        describe_arrays(arrays), ((tensor.name, name) for tensor, name in table.items())
    )
    return Weights(recipe, state, (), prefix, _origin(matching.names), remarks, epochs, stored=held)


def _scaler(optimizer: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the loss scale as in `State.scaler`; empty if it is incomplete or no number above 0."""
    known = {
        match[1]: value
        for name, value in optimizer.items()
        if (match := _OF_OPTIMIZER.fullmatch(name))
    }
    numbers = {name: known[name] for name in _SCALER if name in known}
    if len(numbers) < len(_SCALER) or any(
        value.size != 1 or value.dtype.kind not in "iuf" for value in numbers.values()
    ):
        return {}
    found = {_SCALER[name]: float(value.item()) for name, value in numbers.items()}
    return found if 0 < found["scale"] < math.inf and min(found.values()) >= 0 else {}


def _of_optimizer(prefix: Path) -> dict[str, np.ndarray]:
    path = _file(prefix, _OPTIMIZER)
    return _typed(paddle_pickle.load(path).arrays) if path.exists() else {}


def _typed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays with bfloat16 for uint16, as which Paddle stores its bits."""
    return {
        name: value.view(BFLOAT16) if value.dtype == np.uint16 else value
        for name, value in arrays.items()
    }


def _slot(parameter: str, optimizer: Mapping[str, np.ndarray]) -> str:
    of_master = f"{parameter}{_MASTER}{_VELOCITY}"
    return of_master if of_master in optimizer else f"{parameter}{_VELOCITY}"


def _matched(prefix: Path, arrays: Mapping[str, np.ndarray]) -> Matching:
    """Return the model that has exactly the tensors that a network would compute with."""
    shapes = {name: value.shape for name, value in arrays.items()}
    matchings = (
        match_model(
            model,
            names,
            shapes,
            _stored_shapes,
            lambda name: len(shapes[name]) >= 2 and _MASK not in name,
        )
        for model, spec in MODELS.items()
        for names in _tables(spec, shapes)
    )
    return choose_model(matchings, str(_parameters(prefix)), "Paddle", arrays)


def _tables(spec: ModelSpec, stored: Iterable[str]) -> Iterator[Names]:
    """Yield the names that a model's tensors may have."""
    stored = list(stored)
    # paddle.vision creates a block's shortcut first.
    for convs in (list(convolutions(spec)), order_shortcuts_first(spec)):
        yield _static_names(convs, stored)
    yield _named(list(convolutions(spec)), *_of_original(spec))
    yield _named(list(convolutions(spec)), *_of_resnext(spec)) | {
        "fc.weight": "out.weight",
        "fc.bias": "out.bias",
    }
    yield _named(
        list(convolutions(spec)), lambda conv: f"{conv.name}.weight", lambda conv: conv.bn_name
    )


def _static_names(convs: list[Conv], stored: list[str]) -> Names:
    kernels = _counted("conv2d", stored, len(convs))
    norms = _counted("batch_norm(?:2d)?", stored, len(convs))
    table = {}
    for conv, kernel, norm in zip(convs, kernels, norms, strict=True):
        table[f"{conv.name}.weight"] = f"{kernel}.w_0"
        table |= {f"{conv.bn_name}.{suffix}": f"{norm}.{leaf}" for suffix, leaf in _STATIC.items()}
    (head,) = _counted("linear", stored, 1)
    return table | {"fc.weight": f"{head}.w_0", "fc.bias": f"{head}.b_0"}


def _counted(kind: str, stored: list[str], count: int) -> list[str]:
    """Return the first `count` layers of a kind in order. They may begin at any number; missing
    ones follow the last."""
    found = {
        (int(match[2]), match[1])
        for name in stored
        if (match := re.fullmatch(rf"({kind})_([0-9]{{1,9}})\.\w+", name))
    }
    layers = sorted(found)[:count]
    last, word = layers[-1] if layers else (-1, kind.partition("(")[0])
    return [
        f"{name}_{i}"
        for i, name in [*layers, *((last + i, word) for i in range(1, count + 1 - len(layers)))]
    ]


def _of_original(spec: ModelSpec) -> tuple[Callable[[Conv], str], Callable[[Conv], str]]:
    """Return two functions: the names of a convolution's kernel and of its batch norm in the
    original's code."""
    scopes = {stem(spec).name: "stem.0"}
    for i, block in enumerate(blocks(spec)):
        scopes |= {conv.name: f"blocks.{i}.conv{j}" for j, conv in enumerate(block.convs)}
        if block.shortcut is not None:
            scopes[block.shortcut.name] = f"blocks.{i}.short"
    return lambda conv: f"{scopes[conv.name]}.conv.weight", lambda conv: f"{scopes[conv.name]}.bn"


def _of_resnext(spec: ModelSpec) -> tuple[Callable[[Conv], str], Callable[[Conv], str]]:
    """Return two functions: the names of a convolution's kernel and of its batch norm in
    PaddleClas' ResNeXt."""
    scopes = {stem(spec).name: "conv"}
    for block in blocks(spec):
        stage, number = block.name.removeprefix("layer").split(".")
        scope = f"bb_{int(stage) - 1}_{number}"
        scopes |= {conv.name: f"{scope}.conv{j}" for j, conv in enumerate(block.convs)}
        if block.shortcut is not None:
            scopes[block.shortcut.name] = f"{scope}.short"
    return (
        lambda conv: f"{scopes[conv.name]}._conv.weight",
        lambda conv: f"{scopes[conv.name]}._batch_norm",
    )


def _origin(names: Names) -> str:
    """Return the program that gives these names. NVIDIA's code saves static programs only, so
    layers are PaddleClas'."""
    programs = dict.fromkeys(("conv._conv.weight", "stem.0.conv.weight"), "PaddleClas") | {
        "conv1.weight": "paddle.vision"
    }
    return programs.get(names["conv1.weight"], "NVIDIA Paddle")


def _named(convs: list[Conv], kernel: Callable[[Conv], str], norm: Callable[[Conv], str]) -> Names:
    table = {"fc.weight": "fc.weight", "fc.bias": "fc.bias"}
    for conv in convs:
        table[f"{conv.name}.weight"] = kernel(conv)
        table |= {
            f"{conv.bn_name}.{suffix}": f"{norm(conv)}.{leaf}" for suffix, leaf in _LAYER.items()
        }
    return table


def _stored_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    """Return the shapes a tensor may have in a file; the original's shape comes first."""
    if is_stem(tensor):
        outputs, inputs, height, width = tensor.shape
        return ((outputs, inputs + 1, height, width), tensor.shape)
    return (tensor.shape[::-1] if tensor.role == "fc_weight" else tensor.shape,)


def _canonical(
    prefix: Path, stored: Mapping[str, np.ndarray], name: str, tensor: Tensor
) -> np.ndarray:
    """Return a variable, or the velocity of one, as a new canonical float32 array."""
    kind = dtype_name(stored[name].dtype)
    values = numbers(stored[name])
    if values.shape not in _stored_shapes(tensor) or values.dtype.kind != "f":
        expected = list(_stored_shapes(tensor)[0])
        raise CheckpointError(
            f"{prefix}: {name} is {kind} {list(values.shape)}, expected float32 {expected}"
        )
    if is_stem(tensor):
        values = values[:, : tensor.shape[1]]
    elif tensor.role == "fc_weight":
        values = values.T
    return np.array(values, np.float32, order="C")


def _about_step(prefix: Path) -> str:
    epoch = prefix.absolute().parent.name
    return "no step is stored" + (
        f"; its folder names epoch {epoch}, counted from 0" if epoch.isdecimal() else ""
    )


def _remarks(
    arrays: Mapping[str, np.ndarray], sources: Mapping[Tensor, str], table: Mapping[Tensor, str]
) -> Iterable[str]:
    if any(
        is_stem(tensor) and arrays[name].shape != tensor.shape for tensor, name in table.items()
    ):
        yield FOURTH_CHANNEL
    masters = [source for tensor, source in sources.items() if source != table[tensor]]
    if masters:
        yield (
            f"{len(masters)} weights are the float32 copies that the optimizer keeps, such as"
            f" {masters[0]}"
        )
    odd = [
        source
        for source in sources.values()
        if source in arrays and arrays[source].dtype != np.float32
    ]
    if odd:
        yield f"{len(odd)} variables, such as {odd[0]}, are not float32 and were converted to it"


def write(prefix: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write a state with the names of the original's static program; return the files and remarks
    on them.

    The stem gets a fourth input channel of zeros, since the original's images have four channels.
    Without momentum no `.pdopt` is written. `into` is as in `write_new`. Raises `CheckpointError`
    if one of the two files exists already.
    """
    prefix = _prefix(prefix)
    spec = model_spec(recipe.model)
    expected = check_state(spec, recipe.logits, state)
    names = _static_names(list(convolutions(spec)), [])
    parameters = {
        names[tensor.name]: _stored(state.tensors[tensor.name], tensor) for tensor in expected
    }
    velocities = {
        f"{names[tensor.name]}{_VELOCITY}": _stored(state.momentum[tensor.name], tensor)
        for tensor in expected
        if tensor.name in state.momentum
    }
    added: dict[str, np.ndarray] = {}
    if velocities:
        # Paddle 3 looks for a scheduled learning rate among the parameters, Paddle 2 among the
        # optimizer's variables.
        rate = {"learning_rate_0": np.zeros(1, np.float32)}
        parameters |= rate
        added = rate | _loss_scale(recipe, state)
        velocities |= added
    files = _write(prefix, parameters, velocities, into)
    about = (
        (f"{', '.join(added)} were added, since programs of Paddle look for them",) if added else ()
    )
    return Written(files, files, tuple(_unlike_original(recipe, state)), about)


def _stored(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return an array in the original's layout."""
    if is_stem(tensor):
        return np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    return values.T if tensor.role == "fc_weight" else values


def _loss_scale(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    """Return the additional variables that a program with --amp looks for."""
    scaler = {"scale": recipe.loss_scale, "good_steps": 0, "bad_steps": 0} | state.scaler
    return {
        "loss_scaling_0": np.array([scaler["scale"]], np.float32),
        "num_good_steps_0": np.array([scaler["good_steps"]], np.int32),
        "num_bad_steps_0": np.array([scaler["bad_steps"]], np.int32),
    }


def _write(
    prefix: Path,
    parameters: dict[str, np.ndarray],
    optimizer: dict[str, np.ndarray],
    into: Path | None,
) -> tuple[Path, ...]:
    """Write a checkpoint. Its parameters are written last: without them it is not a checkpoint."""
    contents = (
        {_OPTIMIZER: optimizer, _PARAMETERS: parameters} if optimizer else {_PARAMETERS: parameters}
    )
    files: Writers = {
        _file(prefix, ending): partial(paddle_pickle.dump, arrays=arrays)
        for ending, arrays in contents.items()
    }
    write_new(prefix, files, _file(prefix, _OPTIMIZER), into=into)
    return tuple(reversed(files))


def _unlike_original(recipe: Recipe, state: State) -> Iterable[str]:
    yield (
        "the stem has a fourth input channel of zeros, as the original's --image-shape 4,224,224"
        " needs it"
    )
    if recipe.model != _MODEL:
        yield f"the original's code has only the model {_MODEL}; this is another"
    if recipe.padding == "same":
        yield (
            "the original's graph pads symmetrically; these weights were trained with TensorFlow's"
            " SAME padding"
        )
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
