"""ResNets in PyTorch's files, as torchvision, timm and NVIDIA's code save them: conversion to
canonical names.

The state_dict is the whole file, or a value of it:

    {"epoch", "best_prec1", "state_dict", "optimizer"[, "state_dict_ema"]}           NVIDIA; others write the same and more
    {"model", "optimizer", "lr_scheduler", "epoch", "args"[, "model_ema", "scaler"]}     torchvision's reference script
    {"epoch", "arch", "state_dict", "optimizer", "version", "args"[, "state_dict_ema", "amp_scaler"]}     timm

Names of tensors are torchvision's, which are the canonical ones; timm's are the same. NVIDIA's code
says `layers.0.` for `layer1.`, except in the files that it published as version 20.06.0. All of
them may begin with `module.` (several ranks) and `_orig_mod.` (a compiled model), and then with a
prefix that all share, such as `model.`. v1 and v1.5 have the same tensors; such a file is taken for
v1.5, as NVIDIA's, torchvision's and timm's models are.

The update of torch.optim.SGD is: velocity = momentum * velocity + (gradient + decay * weight);
weight -= lr * velocity. The learning rate is outside the velocity, as in the canonical form. An
optimizer numbers parameters in the order of its groups. NVIDIA's groups are: parameters with "bn"
in the name (so without those of `downsample.1`), without weight decay; the rest.

Sources: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: models/resnet.py,
models/model.py, optimizers.py, training.py, configs.yml; torchvision's models/resnet.py and
references/classification/train.py; timm's checkpoint_saver.py; PyTorch's optim/sgd.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS, ModelSpec, Tensor, features, tensors
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnext101_32x4d_pytorch_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import dtype_name, numbers, torch_file
from lockstep.weights.formats.common import (
    Matching,
    Shape,
    choose_model,
    describe_missing_velocities,
    describe_unused,
    match_model,
)
from lockstep.weights.known_preprocessing import find_published
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays

NAME = "PyTorch"

NVIDIA = "NVIDIA PyTorch"
_ENDINGS = (".pth", ".pth.tar", ".pt", ".bin")
_OF_FOLDER = ("checkpoint.pth.tar", "last.pth.tar", "model_best.pth.tar", "pytorch_model.bin")
"""Files that stand for their folder: the last checkpoint of NVIDIA's code and of timm, the best
one, a model of a hub."""
_WEIGHTS = ("state_dict", "model", "model_state_dict")
_AVERAGES = ("state_dict_ema", "model_ema")
_OPTIMIZER = "optimizer"
_SCALERS = ("scaler", "amp_scaler")
_BEST = ("best_prec1", "best_acc1")
_KNOWN = {
    *_WEIGHTS,
    *_AVERAGES,
    _OPTIMIZER,
    *_SCALERS,
    *_BEST,
    "epoch",
    "arch",
    "args",
    "version",
    "metric",
    "lr_scheduler",
}
_PREFIX = re.compile(r"(?:module\.|_orig_mod\.)+")
_NVIDIA_STAGE = re.compile(r"layers\.([0-3])\.")
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?num_batches_tracked|n_averaged")
"""Counters: of a batch norm, and of a moving average."""
_VELOCITY = "momentum_buffer"
_LOGITS = 1000
_OF_TORCHVISION = re.compile(
    r"resnet(?:18-(?:f37072fd|5c106cde)|34-(?:b627a593|333f7ec4)|50-(?:0676ba61|11ad3fa6|19c8e357)"
    r"|101-(?:63fe2227|cd907fc2|5d3b4d8f)|152-(?:394f9c45|f82ba261|b121ed2d))\.pth"
)
"""The names of the files that torchvision downloads."""


@dataclass(frozen=True)
class _Contents:
    """What a file holds."""

    root: dict[Any, Any]
    """The whole file. A state_dict alone is below "state_dict"."""
    weights: str
    """The key of the state_dict, which may be that of a moving average."""
    average: str | None
    """The key of the moving average next to it."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file is in one of PyTorch's containers, or a program of PyTorch."""
    return torch_file.is_torch_file(head, path)


def find(path: Path) -> Path | None:
    """Return the file that a path names; None if it names none of PyTorch's.

    A path is a file with an ending of PyTorch's, or a folder with NVIDIA's or timm's
    last or best checkpoint or with a `pytorch_model.bin`.
    """
    if path.is_dir():
        return next((path / name for name in _OF_FOLDER if (path / name).is_file()), None)
    return path if path.name.endswith(_ENDINGS) and path.is_file() else None


def read(path: Path, *, momentum: bool = True) -> Weights:
    """Read a ResNet that has a name here, as torchvision, timm or NVIDIA's code saves it.

    Tensors and velocities become new float32 arrays. The moving average is in `State.ema` if the
    weights are there too. Without `momentum` neither velocities nor moving average are converted,
    nor read from a zip archive. Raises `CheckpointError` if the file is damaged, incomplete or of
    another model.
    """
    return of_state_dict(
        path,
        torch_file.load(path, without=None if momentum else _besides_weights),
        momentum=momentum,
    )


def _besides_weights(value: Any) -> tuple[str, ...]:
    """Return the keys of what is not needed for the weights alone."""
    if not isinstance(value, dict) or _is_state_dict(value):
        return ()
    return (
        _OPTIMIZER,
        *(_AVERAGES if any(_is_state_dict(value.get(key)) for key in _WEIGHTS) else ()),
    )


def of_state_dict(path: Path, value: Any, *, momentum: bool = False) -> Weights:
    """Return what `read` returns, of the value that the file `path` holds: a state_dict, or a
    checkpoint with one."""
    contents = _contents(path, value)
    stored = contents.root[contents.weights]
    prefix = _shared_prefix(stored)
    names = _names(path, stored, prefix)
    matching, has_classifier = _matched(path, stored, names)
    expected = [
        tensor
        for tensor in tensors(MODELS[matching.model], matching.logits)
        if tensor.name in names
    ]
    found = {
        tensor.name: _float32(path, names[tensor.name], stored[names[tensor.name]])
        for tensor in expected
    }
    trained = [
        tensor for name in names for tensor in expected if tensor.name == name and tensor.is_trained
    ]
    groups = _groups(contents.root.get(_OPTIMIZER))
    velocities, about = (
        _velocities(contents.root.get(_OPTIMIZER), trained) if momentum else ({}, ())
    )
    average, about_average = _average(path, contents, expected) if momentum else ({}, ())
    origin = _origin(path, contents.root, stored, prefix, trained, groups)
    epochs, about_epoch = _epochs(contents.root, origin)
    is_alone = contents.root.keys() == {contents.weights}
    about_run = (
        *([about_epoch] if momentum and not is_alone else []),
        *about_average,
        *([] if is_alone else about),
    )
    remarks = (
        *(
            [f"all names of tensors begin with {prefix!r:.60}, which was taken off"]
            if prefix
            else ()
        ),
        *about_run,
        *_about_weights(contents, stored, names, expected, has_classifier),
        *describe_unused(sorted(_text(name) for name in contents.root if name not in _KNOWN)),
    )
    scaler = _scaler(contents.root)
    recipe = _recipe(path, origin, matching)
    published = find_published(path) if is_alone else None
    if published is not None:
        recipe = recipe.replace(**published)
    arrays = {
        name: kept
        for name, kept in stored.items()
        if isinstance(name, str) and isinstance(kept, np.ndarray)
    }
    held = list_arrays(describe_arrays(arrays), ((tensor, names[tensor]) for tensor in found))
    state = State(0, found, velocities, average, scaler)
    return Weights(
        recipe,
        state,
        (),
        path,
        origin,
        remarks,
        epochs,
        has_preprocessing=published is not None,
        stored=held,
    )


def _contents(path: Path, value: Any) -> _Contents:
    """Return where a file has its weights. Raises `CheckpointError` if it has none."""
    if _is_state_dict(value):
        return _Contents({_WEIGHTS[0]: value}, _WEIGHTS[0], None)
    root = value if isinstance(value, dict) else {}
    weights, average = (_only(path, root, keys) for keys in (_WEIGHTS, _AVERAGES))
    if weights is None and average is None:
        keys = [_text(key) for key in root][:5]
        raise CheckpointError(
            f"{path} holds no state_dict of a convolutional network, at its top or below"
            f" {', '.join(_WEIGHTS + _AVERAGES)}; it is a"
            f" {type(value).__name__}{f' with {keys}' if keys else ''}. Save it again with"
            " torch.save(model.state_dict(), path)."
        )
    return _Contents(root, weights or average or "", average if weights else None)


def _only(path: Path, root: Mapping[Any, Any], keys: Iterable[str]) -> str | None:
    """Return which of some keys has a state_dict; None if none has. Raises `CheckpointError` if
    several have."""
    found = [key for key in keys if _is_state_dict(root.get(key))]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds several networks: {', '.join(found)}; save the one to use alone with"
            " torch.save(network, path)"
        )
    return found[0] if found else None


def _text(key: Any) -> str:
    """Return the key of a dict for a message."""
    return key[:40] if isinstance(key, str) else f"a {type(key).__name__}"


def _is_state_dict(value: Any) -> bool:
    """Return whether a value is a dict that holds a kernel: an array with four axes."""
    return isinstance(value, dict) and any(
        isinstance(array, np.ndarray) and array.ndim == 4 for array in value.values()
    )


def _shared_prefix(stored: Mapping[Any, Any]) -> str:
    """Return what the names of all arrays that have axes begin with, after `module.` and
    `_orig_mod.`; "" for nothing.

    >>> _shared_prefix({"module.net.conv1.weight": np.zeros(2), "net.fc.bias": np.zeros(2), "n_averaged": np.array(3)})
    'net.'
    """
    arrays = {
        name: value
        for name, value in stored.items()
        if isinstance(name, str) and isinstance(value, np.ndarray)
    }
    parts = [
        _without_wrappers(name).split(".")[:-1] for name, value in arrays.items() if value.ndim
    ]
    ends = zip(
        min(parts, default=[]), max(parts, default=[]), strict=False
    )  # what both begin with, all begin with
    return "".join(f"{part}." for part, _ in takewhile(lambda pair: pair[0] == pair[1], ends))


def _without_wrappers(name: str) -> str:
    return _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name


def _bare(name: str, prefix: str) -> str:
    """Return the canonical name of a tensor, which is also torchvision's, from its name in a file."""
    name = _without_wrappers(name).removeprefix(prefix)
    return (
        _NVIDIA_STAGE.sub(lambda match: f"layer{int(match[1]) + 1}.", name, count=1)
        if name.startswith("layers.")
        else name
    )


def nvidia_name(name: str) -> str:
    """Return the name of a canonical tensor in NVIDIA's code.

    >>> nvidia_name("layer1.0.downsample.0.weight")
    'layers.0.0.downsample.0.weight'
    """
    return re.sub(r"^layer([1-4])\.", lambda match: f"layers.{int(match[1]) - 1}.", name)


def _names(path: Path, stored: Mapping[Any, Any], prefix: str) -> dict[str, str]:
    """Return the names in a state_dict by canonical name, in its order. Raises `CheckpointError` if
    two are the same."""
    found: dict[str, str] = {}
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            continue
        bare = _bare(name, prefix)
        if _NOT_WEIGHTS.fullmatch(bare):
            continue
        if bare in found:
            raise CheckpointError(
                f"{path} has the tensor {bare} twice: as {found[bare]} and as {name}"
            )
        found[bare] = name
    return found


def _matched(
    path: Path, stored: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> tuple[Matching, bool]:
    """Return the model that has exactly the tensors of a file, and whether the file has a
    classifier."""
    shapes = {name: stored[name].shape for name in names.values()}
    has_classifier = any(name.startswith("fc.") for name in names)
    renamed = (
        nvidia_name
        if any(f"layers.{stage}." in name for name in shapes for stage in range(4))
        else str
    )

    def held(model: str, spec: ModelSpec) -> Matching:
        head: dict[str, Shape] = (
            {}
            if has_classifier
            else {"fc.weight": (_LOGITS, features(spec)), "fc.bias": (_LOGITS,)}
        )
        table = {
            tensor.name: names.get(tensor.name, renamed(tensor.name))
            for tensor in tensors(spec, _LOGITS)
        }
        return match_model(
            model, table, shapes | head, lambda tensor: (tensor.shape,), lambda name: True
        )

    matchings = (held(model, spec) for model, spec in MODELS.items())
    return choose_model(matchings, path, "PyTorch", names.values()), has_classifier


def _float32(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Return an array as a new contiguous float32 array. Raises `CheckpointError` if it is not of
    floats."""
    found = numbers(values)
    if found.dtype.kind != "f":
        raise CheckpointError(
            f"{path}: {name} is {dtype_name(values.dtype)} {list(values.shape)}, expected float32"
        )
    return np.array(found, np.float32, order="C")


def _average(
    path: Path, contents: _Contents, expected: list[Tensor]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the moving average next to the weights, and remarks on it. One that does not fit is
    left out."""
    if contents.average is None:
        return {}, ()
    stored = contents.root[contents.average]
    names = _names(path, stored, _shared_prefix(stored))
    shapes = {name: stored[known].shape for name, known in names.items()}
    if shapes != {tensor.name: tensor.shape for tensor in expected}:
        return {}, (
            (
                f"the moving average ({contents.average}) has other tensors than the weights and"
                " was left out"
            ),
        )
    return {
        tensor.name: _float32(path, names[tensor.name], stored[names[tensor.name]])
        for tensor in expected
    }, ()


def _about_weights(
    contents: _Contents,
    stored: Mapping[str, np.ndarray],
    names: Mapping[str, str],
    expected: list[Tensor],
    has_classifier: bool,
) -> Iterator[str]:
    if contents.weights in _AVERAGES:
        yield f"its only weights are a moving average ({contents.weights})"
    if not has_classifier:
        yield (
            "it has no classifier (fc.weight, fc.bias), so it names no classes; training can start"
            " from it"
        )
    odd = [
        names[tensor.name] for tensor in expected if stored[names[tensor.name]].dtype != np.float32
    ]
    if odd:
        yield f"{len(odd)} tensors, such as {odd[0]}, are not float32 and were converted to it"


def _groups(optimizer: Any) -> list[dict[Any, Any]]:
    """Return the parameter groups of an optimizer; empty if it is not PyTorch's."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list):
        return []
    known = all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    return groups if known else []


def nvidia_groups(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of trained tensors in the order of NVIDIA's two groups: those with "bn" in
    the name, and the rest."""
    names = list(names)
    return [name for name in names if "bn" in name], [name for name in names if "bn" not in name]


def _orders(trained: list[Tensor]) -> Iterator[tuple[list[str], ...]]:
    """Yield the names of trained tensors in the groups of known programs. They differ in size, so
    only one can fit."""

    def split(is_first: Callable[[Tensor], bool]) -> tuple[list[str], list[str]]:
        first = [tensor.name for tensor in trained if is_first(tensor)]
        return first, [tensor.name for tensor in trained if not is_first(tensor)]

    yield ([tensor.name for tensor in trained],)
    yield nvidia_groups(tensor.name for tensor in trained)
    yield split(lambda tensor: len(tensor.shape) == 1)  # timm
    yield split(lambda tensor: len(tensor.shape) > 1)
    yield split(
        lambda tensor: not tensor.role.startswith("bn")
    )  # torchvision with --norm-weight-decay


def _velocities(
    optimizer: Any, trained: list[Tensor]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return velocities by canonical name, and remarks. Where they do not fit, none are returned."""
    groups = _groups(optimizer)
    shapes = {tensor.name: tensor.shape for tensor in trained}
    kept = optimizer.get("state") if groups else None
    if not isinstance(kept, dict) or not kept:
        return {}, tuple(describe_missing_velocities(list(shapes), len(shapes), _OPTIMIZER))
    sizes = [len(group["params"]) for group in groups]
    order = next(
        (order for order in _orders(trained) if [len(names) for names in order] == sizes), None
    )
    if order is None:
        return {}, (
            (
                f"the velocities were left out: the optimizer's groups of {sizes} parameters are of"
                " no known program"
            ),
        )
    slots = dict(
        zip(
            (name for names in order for name in names),
            (i for group in groups for i in group["params"]),
            strict=True,
        )
    )
    found = {name: kept.get(slot) for name, slot in slots.items() if isinstance(slot, int)}
    entries = {name: entry for name, entry in found.items() if isinstance(entry, dict)}
    others = sorted({_text(key) for entry in entries.values() for key in entry} - {_VELOCITY})
    if others:
        return {}, (
            (
                "the velocities were left out: the optimizer is not SGD, it also keeps"
                f" {', '.join(others[:3])}"
            ),
        )
    buffers = {name: entry.get(_VELOCITY) for name, entry in entries.items()}
    arrays = {
        name: numbers(value) for name, value in buffers.items() if isinstance(value, np.ndarray)
    }
    velocities = {name: value for name, value in arrays.items() if value.dtype.kind == "f"}
    odd = [name for name, value in velocities.items() if value.shape != shapes[name]]
    if odd:
        first = f"{odd[0]} is {list(velocities[odd[0]].shape)}, expected {list(shapes[odd[0]])}"
        return {}, (f"the velocities were left out: their order is unknown, {first}",)
    missing = [name for name in shapes if name not in velocities]
    if missing:
        return {}, tuple(describe_missing_velocities(missing, len(shapes), _VELOCITY))
    nesterov = any(group.get("nesterov") is True for group in groups)
    about = (
        ("its optimizer used Nesterov momentum: resume it with --set nesterov=true",)
        if nesterov
        else ()
    )
    return {name: np.array(velocities[name], np.float32, order="C") for name in shapes}, about


def _origin(
    path: Path,
    root: Mapping[Any, Any],
    stored: Any,
    prefix: str,
    trained: list[Tensor],
    groups: list[dict[Any, Any]],
) -> str:
    """Return the program that wrote a file, by its names of tensors, modules and values, and by its
    own name."""
    if any(
        isinstance(name, str) and _without_wrappers(name).startswith(f"{prefix}layers.")
        for name in stored
    ):
        return NVIDIA
    split = [len(names) for names in nvidia_groups(tensor.name for tensor in trained)]
    if path.name.startswith("nvidia_") or [len(group["params"]) for group in groups] == split:
        return NVIDIA
    modules = {
        _without_wrappers(name).removeprefix(prefix) for name in getattr(stored, "modules", ())
    }
    if (
        modules & {"act1", "global_pool"}
        or {"arch", "args", "version"} <= root.keys()
        or path.name == "pytorch_model.bin"
    ):
        return "timm"
    is_torchvision = {"relu", "avgpool", "layer1.0.relu"} <= modules or {
        "model",
        "args",
        "lr_scheduler",
    } <= root.keys()
    return "torchvision" if is_torchvision or _OF_TORCHVISION.fullmatch(path.name) else "PyTorch"


def _number(value: Any) -> float | None:
    """Return a finite number that may be stored as an array without axes; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and numbers(value).dtype.kind in "iuf":
        value = numbers(value).item()
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
    return float(value) if known and math.isfinite(value) else None


def _epochs(root: Mapping[Any, Any], origin: str) -> tuple[int | None, str]:
    """Return the number of epochs done, None if it is unknown, and a remark on when a file was
    saved.

    NVIDIA's code stores the number of the next epoch, as PyTorch's ImageNet example does.
    torchvision's script and timm store that of the last one. Both count from 0.
    """
    stored = _number(root.get("epoch"))
    best = next((_number(root[key]) for key in _BEST if key in root), None)
    no_step = "no step is stored"
    if stored is None or stored != int(stored) or stored < 0:
        return None, no_step
    about_best = f"; the best top-1 until then was {best:.2f} %" if best else ""
    if origin in ("torchvision", "timm"):
        return (
            int(stored) + 1,
            f"{no_step}; it was saved after {int(stored) + 1} epochs{about_best}",
        )
    if origin == NVIDIA or any(key in root for key in _BEST):
        return int(stored), f"{no_step}; it was saved after {int(stored)} epochs{about_best}"
    return None, f"{no_step}; it names epoch {int(stored)}, which may be the last or the next"


def _scaler(root: Mapping[Any, Any]) -> dict[str, float]:
    """Return the loss scale as in `State.scaler`; empty if there is none, or no number above 0."""
    stored: Any = next((root[key] for key in _SCALERS if isinstance(root.get(key), dict)), {})
    scale = _number(stored.get("scale")) or 0.0
    steps = _number(stored.get("_growth_tracker")) or 0.0
    return (
        {"scale": scale, "good_steps": steps, "bad_steps": 0.0} if scale > 0 and steps >= 0 else {}
    )


def _recipe(path: Path, origin: str, matching: Matching) -> Recipe:
    """Return NVIDIA's recipe for its own model, else the default; in fp32. Raises `CheckpointError`
    if none is possible."""
    try:
        if origin != NVIDIA:
            return Recipe(model=matching.model, logits=matching.logits, precision="fp32")
        recipe = resnext101_32x4d_pytorch_90ep().replace(
            model=matching.model, logits=matching.logits, precision="fp32"
        )
    except RecipeError as error:
        raise CheckpointError(f"{path}: {error}") from None
    # configs.yml: ResNet-50 is trained with another batch and weight decay.
    is_resnext = matching.model == "resnext101-32x4d"
    return (
        recipe if is_resnext else recipe.replace(global_batch_images=2048, weight_decay=1 / 32768)
    )
