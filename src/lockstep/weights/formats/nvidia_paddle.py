"""Checkpoints of NVIDIA's PaddlePaddle model and other Paddle ResNets: conversion from and to
canonical names and layouts, which docs/reference/checkpoints.md lists.

Static programs number their layers in the order of creation: the stem, then for each block its
convolutions and its shortcut. The stem has a fourth input channel. DALI fills it with zeros, so
that its weights have no effect. Velocities need no conversion: the learning rate is outside, and
gradients are unscaled before they are added.

`paddle.save(layer.state_dict())` uses the names of layers (`_MODULES`). All of these models stride
in the 3x3. PaddleClas' ResNet18 and ResNet34 have a shortcut with a kernel in their first block,
which torchvision's do not have.

Sources: NVIDIA DeepLearningExamples, PaddlePaddle/Classification/RN50v1.5, models/resnet.py,
utils/save_load.py, config.py; Paddle's static/pir_io.py, optimizer/momentum.py,
vision/models/resnet.py; PaddleClas, ppcls/arch/backbone, legendary_models/resnet.py,
model_zoo/resnext.py.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import Conv, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_paddle_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, common, paddle_pickle, table
from lockstep.weights.opened_weights import Weights
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
_OF_RUN = re.compile(
    r"(learning_rate|loss_scaling|num_good_steps|num_bad_steps)_\d+|learning_rate|@\w+_COUNTER@"
    r"|LR_Scheduler|global_step|epoch"
)
"""Numbers of the optimizer besides velocities. The recipe sets the learning rate, which is not
used."""
_OF_PARAMETER = re.compile(
    rf"(.+?)(?:{_MASTER})?(?:_asp_mask|_(?:velocity|moment\d?|beta\d_pow_acc|mean_\w+)_\d+)?"
)
"""The names of what the optimizer has for a parameter."""
_SCALER = {"loss_scaling": "scale", "num_good_steps": "good_steps", "num_bad_steps": "bad_steps"}
"""Parts of `State.scaler` by variable."""
_LAYOUT = {"conv_weight": ("OIHW",), "stem": ("OJHW", "OIHW"), "fc_weight": ("IO",)}
_MODULES = (
    (
        *("stem.0", "blocks.{block0}.conv{conv0}", "blocks.{block0}.short"),
        *(".conv.weight", ".bn.", "fc"),
    ),
    (
        *("conv", "bb_{stage0}_{number0}.conv{conv0}", "bb_{stage0}_{number0}.short"),
        *("._conv.weight", "._batch_norm.", "out"),
    ),
)
"""The scopes of PaddleClas' convolutions, the names of kernel and batch norm below them, and the
classifier's."""
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
    """Return the prefix of the checkpoint that a path names; None if there is none.

    A path is a prefix, one of its files, the folder of an epoch, a folder of such
    folders, or the folder around `ResNet50`. Of several epochs the last one with both files is
    used, as in NVIDIA's code. Raises `CheckpointError` if the path is ambiguous.
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
    named = _file(prefix, _PARAMETERS)
    contents = paddle_pickle.load(named if named.is_file() else prefix)
    arrays = _mark_bfloat16(contents.arrays)
    is_rounded = any(value.dtype != np.float32 for value in arrays.values())
    optimizer = _read_optimizer(prefix) if momentum or is_rounded else {}
    parameters = {name: contents.parameters.get(name, name) for name in arrays}
    stored = _Stored(parameters, set(parameters.values()), optimizer.keys())
    format = table.Format(
        program=NAME,
        layout=_LAYOUT,
        list_names=lambda spec, shapes: _list_names(spec, list(shapes)),
        explain=stored.explain,
        name_velocity=stored.name_velocity,
        velocities=f"*{_VELOCITY}",
        find_source=stored.find_copy,
    )
    tensors = table.Table.of(prefix, optimizer | arrays, contents.others)
    weights, names = table.read(tensors, format, resnet50_paddle_90ep(), choice, momentum=momentum)
    folder = prefix.absolute().parent.name
    step = "no step is stored"
    if folder.isdecimal():
        step += f"; its folder names epoch {folder}, counted from 0"
    copies = [stored.find_copy(name) for name in names.values() if stored.find_copy(name) != name]
    if copies:
        weights = weights.add_remarks(
            f"{len(copies)} weights are the float32 copies that the optimizer keeps, such as"
            f" {copies[0]}"
        )
    return replace(
        weights,
        state=replace(weights.state, scaler=_read_scaler(optimizer) if momentum else {}),
        origin=_PROGRAMS.get(names["conv1.weight"], "NVIDIA Paddle"),
        remarks=((step,) if momentum else ()) + weights.remarks,
        epochs=int(folder) + 1 if folder.isdecimal() else None,
    )


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint has, by name."""

    parameters: Mapping[str, str]
    """The parameters of its arrays, as the optimizer names them."""
    trained: Collection[str]
    """All of these parameters."""
    optimizer: Collection[str]

    def find_copy(self, name: str) -> str:
        """Return the optimizer's float32 copy of an array; the array itself without one."""
        copy = f"{self.parameters[name]}{_MASTER}"
        return copy if copy in self.optimizer else name

    def name_velocity(self, name: str) -> str:
        """Return the velocity of an array: that of its copy, if there is one."""
        slot = f"{self.parameters[name]}{_MASTER}{_VELOCITY}"
        return slot if slot in self.optimizer else f"{self.parameters[name]}{_VELOCITY}"

    def explain(self, name: str, shape: common.Shape) -> str:
        """Return why an array has no effect on inference; "" if it may have one."""
        match = _OF_PARAMETER.fullmatch(name)
        of_parameter = match and match[1] != name and match[1] in self.trained
        if of_parameter or (name not in self.parameters and name in self.optimizer):
            return table.OPTIMIZER
        return table.COUNTER if _OF_RUN.fullmatch(name) and math.prod(shape) == 1 else ""


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
    return {
        name: value.view(BFLOAT16) if value.dtype == np.uint16 else value
        for name, value in arrays.items()
    }


def _list_names(spec: ModelSpec, stored: list[str]) -> Iterator[common.Names]:
    """Yield the names that a model's tensors may have."""
    # paddle.vision creates a block's shortcut first.
    yield _name_variables(list(spec.list_convolutions()), stored)
    yield _name_variables(common.order_shortcuts_first(spec), stored)
    for stem, inner, shortcut, kernel, norm, head in _MODULES:
        scopes = table.name_convolutions(spec, stem, inner, shortcut)
        names = (f"{head}.weight", f"{head}.bias")
        yield table.name_layers(scopes, scopes, _LAYER, names, (kernel, norm))
    kernels = {conv: f"{conv.name}.weight" for conv in spec.list_convolutions()}
    norms = {conv: f"{conv.bn_name}." for conv in kernels}
    yield table.name_layers(kernels, norms, _LAYER, ("fc.weight", "fc.bias"))


def _name_variables(convs: list[Conv], stored: list[str]) -> common.Names:
    """Return the names in a static program that creates convolutions in this order."""
    kernels = _number_layers("conv2d", stored, len(convs))
    norms = _number_layers("batch_norm(?:2d)?", stored, len(convs))
    (head,) = _number_layers("linear", stored, 1)
    return table.name_layers(
        dict(zip(convs, kernels, strict=True)),
        dict(zip(convs, norms, strict=True)),
        _STATIC,
        (f"{head}.w_0", f"{head}.b_0"),
        (".w_0", "."),
    )


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


def write(prefix: Path, recipe: Recipe, state: State, into: Path | None = None) -> common.Written:
    """Write a state with the names of NVIDIA's static program; return the files and remarks
    on them.

    The stem gets a fourth input channel of zeros, since NVIDIA's images have four channels.
    Without momentum no `.pdopt` is written. `into` is as in `write_new`. Raises `CheckpointError`
    if one of the two files exists already.
    """
    prefix = _strip_ending(prefix)
    spec = recipe.spec
    names = _name_variables(list(spec.list_convolutions()), [])
    parameters, momentum = table.name_arrays(_LAYOUT, names, recipe, state)
    velocities = {f"{name}{_VELOCITY}": value for name, value in momentum.items()}
    about: tuple[str, ...] = ()
    if velocities:
        # Paddle 3 looks for a scheduled learning rate among the parameters, Paddle 2 among the
        # optimizer's variables.
        rate = {"learning_rate_0": np.zeros(1, np.float32)}
        parameters |= rate
        added = rate | _make_scaler(recipe, state)
        velocities |= added
        about = (f"{', '.join(added)} were added, since Paddle programs look for them",)
    files: common.Writers = {}
    if velocities:
        files[_file(prefix, _OPTIMIZER)] = partial(paddle_pickle.dump, arrays=velocities)
    # Parameters are written last: without them it is not a checkpoint.
    files[_file(prefix, _PARAMETERS)] = partial(paddle_pickle.dump, arrays=parameters)
    common.write_new(prefix, files, _file(prefix, _OPTIMIZER), into=into)
    both = tuple(reversed(files))
    return common.Written(both, both, tuple(_describe_differences(recipe, state)), about)


def _make_scaler(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    """Return the additional variables that a program with --amp looks for."""
    scaler = {"scale": recipe.loss_scale, "good_steps": 0, "bad_steps": 0} | state.scaler
    return {
        "loss_scaling_0": np.array([scaler["scale"]], np.float32),
        "num_good_steps_0": np.array([scaler["good_steps"]], np.int32),
        "num_bad_steps_0": np.array([scaler["bad_steps"]], np.int32),
    }


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    yield "the stem has a fourth input channel of zeros, for NVIDIA's --image-shape 4,224,224"
    if recipe.model != _MODEL:
        yield f"NVIDIA's code has only the model {_MODEL}, not this one"
    for remark in common.describe_other_padding(recipe):
        yield f"NVIDIA's graph pads symmetrically; {remark}"
    if recipe.logits != _LOGITS:
        yield (
            f"NVIDIA's graph has {_LOGITS} outputs; these weights have {recipe.logits}:"
            " --num-of-class"
        )
    if not state.momentum:
        yield (
            "no velocities were written: --from-pretrained-params accepts this file,"
            " --from-checkpoint does not"
        )
    if state.step:
        yield (
            f"step {state.step} cannot be stored; the folder's name or --last-epoch-of-checkpoint"
            " sets where to resume"
        )
