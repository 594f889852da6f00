"""ResNets in PyTorch's files, as torchvision, timm and NVIDIA's code save them: conversion to
canonical names.

The state_dict is the whole file, or a value of it:

- NVIDIA: `epoch`, `best_prec1`, `state_dict`, `optimizer`, and perhaps `state_dict_ema`. Others
  write the same and more.
- torchvision's reference script: `model`, `optimizer`, `lr_scheduler`, `epoch`, `args`, and perhaps
  `model_ema` and `scaler`.
- timm: `epoch`, `arch`, `state_dict`, `optimizer`, `version`, `args`, and perhaps `state_dict_ema`
  and `amp_scaler`.

Names of tensors are torchvision's or timm's, which are the canonical ones. NVIDIA's code says
`layers.0.` for `layer1.`, except in the files that it published as version 20.06.0. It says
`squeeze.squeeze` and `squeeze.expand` for the convolutions `se.fc1` and `se.fc2`, whose kernels
have two axes in older files. FFCV's code puts `.conv` into the name of a convolution with a blur
before it, next to the `blur_filter`. All of them may begin with `module.` (several ranks) and
`_orig_mod.` (a compiled model), and then with a prefix that all share, such as `model.`.

v1 and v1.5 have the same tensors; such a file is taken for v1.5, as NVIDIA's, torchvision's and
timm's models are. timm's blur has no tensors; such a file is taken for a model without blur, unless
it is one of the known weights.

`torch_training` reads what such a checkpoint holds in addition.

Sources: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: models/resnet.py,
models/model.py, models/common.py, training.py, configs.yml; torchvision's models/resnet.py and
references/classification/train.py; timm's models/resnet.py and checkpoint_saver.py; FFCV's
ffcv-imagenet, train_imagenet.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS, ModelSpec, Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnext101_32x4d_pytorch_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import numbers, torch_file
from lockstep.weights.formats.common import (
    Matching,
    Shape,
    check_floats,
    choose_model,
    describe_converted,
    describe_unused,
    find_converted,
    map_shapes,
    match_model,
)
from lockstep.weights.formats.torch_training import (
    BEST,
    NVIDIA,
    OPTIMIZER,
    SCALERS,
    describe_key,
    list_groups,
    read_epochs,
    read_scaler,
    read_velocities,
    split_nvidia_groups,
)
from lockstep.weights.known_preprocessing import find_published
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "PyTorch"

_ENDINGS = (".pth", ".pth.tar", ".pt", ".bin")
_OF_FOLDER = ("checkpoint.pth.tar", "last.pth.tar", "model_best.pth.tar", "pytorch_model.bin")
"""Files that stand for their folder: the last checkpoint of NVIDIA's code and of timm, the best
one, a model of a hub."""
_WEIGHTS = ("state_dict", "model", "model_state_dict")
_AVERAGES = ("state_dict_ema", "model_ema")
_KNOWN = {*_WEIGHTS, *_AVERAGES, OPTIMIZER, *SCALERS, *BEST}
_KNOWN |= {"epoch", "arch", "args", "version", "metric", "lr_scheduler"}
_PREFIX = re.compile(r"(?:module\.|_orig_mod\.)+")
_NVIDIA_STAGE = re.compile(r"layers\.([0-3])\.")
_NVIDIA_SQUEEZES = {".squeeze.squeeze.": ".se.fc1.", ".squeeze.expand.": ".se.fc2."}
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?num_batches_tracked|n_averaged")
"""Counters: of a batch norm, and of a moving average."""
_BLUR_FILTER = "blur_filter"
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


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet that has a name here, as torchvision, timm or NVIDIA's code saves it.

    Tensors and velocities become new float32 arrays. The moving average is in `State.ema` if the
    weights are there too. Without `momentum` neither velocities nor moving average are converted,
    nor read from a zip archive. Raises `CheckpointError` if the file is damaged, incomplete or of
    another model.
    """
    if momentum:
        return read_state_dict(path, torch_file.load(path), momentum=True)
    return read_state_dict(path, torch_file.load(path, without=_list_unneeded))


def _list_unneeded(value: Any) -> tuple[str, ...]:
    """Return the keys of what is not needed for the weights alone."""
    if not isinstance(value, dict) or _is_state_dict(value):
        return ()
    if any(_is_state_dict(value.get(key)) for key in _WEIGHTS):
        return (OPTIMIZER, *_AVERAGES)
    return (OPTIMIZER,)


def read_state_dict(path: Path, value: Any, *, momentum: bool = False) -> Weights:
    """Return what `read` returns, of the value that the file `path` holds: a state_dict, or a
    checkpoint with one."""
    contents = _find_weights(path, value)
    root = contents.root
    stored = root[contents.weights]
    prefix = _find_shared_prefix(stored)
    names = _map_names(path, stored, prefix)
    matching, has_classifier = _match_model(path, stored, names)
    model = matching.spec.list_tensors(matching.logits)
    expected = {tensor: names[tensor.name] for tensor in model if tensor.name in names}
    parameters = {tensor.name: tensor for tensor in expected if tensor.is_trained}
    trained = [parameters[name] for name in names if name in parameters]
    origin = _find_origin(path, root, stored, prefix, trained)
    epochs, about_epoch = read_epochs(root, origin)
    remarks = []
    if prefix:
        remarks.append(f"all names of tensors begin with {prefix!r:.60}, which was taken off")
    velocities: dict[str, np.ndarray] = {}
    average: dict[str, np.ndarray] = {}
    is_alone = root.keys() == {contents.weights}
    if momentum and not is_alone:
        velocities, about_velocities = read_velocities(root.get(OPTIMIZER), trained)
        average, about_average = _read_average(path, contents, list(expected))
        remarks += [about_epoch, *about_average, *about_velocities]
    remarks += _describe_weights(contents, stored, expected, has_classifier)
    remarks += describe_unused(sorted(describe_key(key) for key in root if key not in _KNOWN))
    values = _convert_arrays(path, stored, expected)
    arrays = describe_arrays(_list_named_arrays(stored))
    recipe = _choose_recipe(path, origin, matching)
    published = find_published(path) if is_alone else None
    if published is not None:
        recipe = recipe.replace(**published)
    return Weights(
        recipe,
        State(0, values, velocities, average, read_scaler(root)),
        (),
        path,
        origin,
        tuple(remarks),
        epochs,
        stated=frozenset(published or ()),
        stored=list_arrays(arrays, zip(values, expected.values(), strict=True)),
    )


def _list_named_arrays(stored: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    arrays = {name: value for name, value in stored.items() if isinstance(value, np.ndarray)}
    return {name: value for name, value in arrays.items() if isinstance(name, str)}


def _find_weights(path: Path, value: Any) -> _Contents:
    """Return where a file has its weights. Raises `CheckpointError` if it has none."""
    if _is_state_dict(value):
        return _Contents({_WEIGHTS[0]: value}, _WEIGHTS[0], None)
    root = value if isinstance(value, dict) else {}
    weights = _find_only(path, root, _WEIGHTS)
    average = _find_only(path, root, _AVERAGES)
    if weights is None and average is None:
        keys = list(map(describe_key, root))[:5]
        contents = f" with {keys}" if keys else ""
        raise CheckpointError(
            f"{path} holds no state_dict of a convolutional network, at its top or below"
            f" {', '.join(_WEIGHTS + _AVERAGES)}; it is a {type(value).__name__}{contents}. Save it"
            " again with torch.save(model.state_dict(), path)."
        )
    return _Contents(root, weights or average or "", average if weights else None)


def _find_only(path: Path, root: Mapping[Any, Any], keys: Iterable[str]) -> str | None:
    """Return which of some keys has a state_dict; None if none has. Raises `CheckpointError` if
    several have."""
    places = [key for key in keys if _is_state_dict(root.get(key))]
    if len(places) > 1:
        raise CheckpointError(
            f"{path} holds several networks: {', '.join(places)}; save the one to use alone with"
            " torch.save(network, path)"
        )
    return places[0] if places else None


def _is_state_dict(value: Any) -> bool:
    """Return whether a value is a dict that holds a kernel: an array with four axes."""
    return isinstance(value, dict) and any(
        isinstance(array, np.ndarray) and array.ndim == 4 for array in value.values()
    )


def _find_shared_prefix(stored: Mapping[Any, Any]) -> str:
    """Return what the names of all arrays that have axes begin with, after `module.` and
    `_orig_mod.`; "" for nothing.

    >>> _find_shared_prefix({"module.net.conv1.weight": np.zeros(2), "net.fc.bias": np.zeros(2)})
    'net.'
    """
    parts = []
    for name, value in _list_named_arrays(stored).items():
        if value.ndim:
            parts.append(_strip_wrappers(name).split(".")[:-1])
    prefix = ""
    # What the first and the last name begin with, all begin with.
    for first, last in zip(min(parts, default=[]), max(parts, default=[]), strict=False):
        if first != last:
            break
        prefix += f"{first}."
    return prefix


def _strip_wrappers(name: str) -> str:
    return name[match.end() :] if (match := _PREFIX.match(name)) else name


def _strip_name(name: str, prefix: str) -> str:
    """Return the canonical name of a tensor, also torchvision's, from its name in a file."""
    name = _strip_wrappers(name).removeprefix(prefix).replace(".conv.weight", ".weight")
    for nvidias, own in _NVIDIA_SQUEEZES.items():
        name = name.replace(nvidias, own)
    if not name.startswith("layers."):
        return name
    return _NVIDIA_STAGE.sub(lambda match: f"layer{int(match[1]) + 1}.", name, count=1)


def to_nvidia_name(name: str) -> str:
    """Return the name of a canonical tensor in NVIDIA's code.

    >>> to_nvidia_name("layer1.0.downsample.0.weight")
    'layers.0.0.downsample.0.weight'
    """
    for nvidias, own in _NVIDIA_SQUEEZES.items():
        name = name.replace(own, nvidias)
    return re.sub(r"^layer([1-4])\.", lambda match: f"layers.{int(match[1]) - 1}.", name)


def _map_names(path: Path, stored: Mapping[Any, Any], prefix: str) -> dict[str, str]:
    """Return the names in a state_dict by canonical name, in its order. Raises `CheckpointError` if
    two are the same."""
    names: dict[str, str] = {}
    for name in _list_named_arrays(stored):
        bare = _strip_name(name, prefix)
        if _NOT_WEIGHTS.fullmatch(bare) or _is_blur_filter(name):
            continue
        if bare in names:
            raise CheckpointError(
                f"{path} has the tensor {bare} twice: as {names[bare]} and as {name}"
            )
        names[bare] = name
    return names


def _is_blur_filter(name: str) -> bool:
    return name.rpartition(".")[2] == _BLUR_FILTER


def _check_blur_filters(path: Path, stored: Mapping[Any, Any]) -> bool:
    """Return whether a file has FFCV's filters of blurs. Raises `CheckpointError` if they are not
    those of Lockstep's blur."""
    arrays = _list_named_arrays(stored)
    filters = {name: value for name, value in arrays.items() if _is_blur_filter(name)}
    line = np.array([0.25, 0.5, 0.25])
    for name, values in filters.items():
        if values.shape[1:] != (1, 3, 3) or not np.array_equal(
            numbers(values), np.broadcast_to(line[:, None] * line, values.shape)
        ):
            raise CheckpointError(
                f"{path}: {name} is another filter than (1, 2, 1) x (1, 2, 1) / 16, which Lockstep"
                " does not have"
            )
    return bool(filters)


def _list_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    """Return the shapes that a tensor may have in a file. 1x1 convolutions of
    squeeze-and-excitation may be dense layers."""
    if ".se." in tensor.name:
        return tensor.shape, tensor.shape[:2]
    return (tensor.shape,)


def _match_model(
    path: Path, stored: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> tuple[Matching, bool]:
    """Return the model that has exactly the tensors of a file, and whether the file has a
    classifier."""
    shapes = {name: stored[name].shape for name in names.values()}
    has_classifier = any(name.startswith("fc.") for name in names)
    is_nvidias = any(re.search(r"layers\.[0-3]\.", name) for name in shapes)

    def match_spec(model: str, spec: ModelSpec) -> Matching:
        head: dict[str, Shape] = {}
        if not has_classifier:
            head = {"fc.weight": (_LOGITS, spec.features), "fc.bias": (_LOGITS,)}
        table = {}
        for tensor in spec.list_tensors(_LOGITS):
            missing = to_nvidia_name(tensor.name) if is_nvidias else tensor.name
            table[tensor.name] = names.get(tensor.name, missing)
        return match_model((model, spec), table, shapes | head, _list_shapes)

    blurs = _check_blur_filters(path, stored)
    models = {name: spec for name, spec in MODELS.items() if (spec.blur == "before") == blurs}
    matchings = starmap(match_spec, models.items())
    return choose_model(matchings, path, "PyTorch", names.values()), has_classifier


def _convert_arrays(
    path: Path, stored: Mapping[str, np.ndarray], names: Mapping[Tensor, str]
) -> dict[str, np.ndarray]:
    """Return tensors as new contiguous float32 arrays. Raises `CheckpointError` if one is not of
    floats."""
    converted = {}
    for tensor, name in names.items():
        values = check_floats(f"{path}: {name}", stored[name])
        converted[tensor.name] = np.array(values, np.float32, order="C").reshape(tensor.shape)
    return converted


def _read_average(
    path: Path, contents: _Contents, expected: list[Tensor]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the moving average next to the weights, and remarks on it. One that does not fit is
    left out."""
    if contents.average is None:
        return {}, ()
    stored = contents.root[contents.average]
    names = _map_names(path, stored, _find_shared_prefix(stored))
    shapes = {bare: stored[name].shape for bare, name in names.items()}
    fits = shapes.keys() == map_shapes(expected).keys() and all(
        shapes[tensor.name] in _list_shapes(tensor) for tensor in expected
    )
    if not fits:
        return {}, (
            f"the moving average ({contents.average}) has other tensors than the weights and was"
            " left out",
        )
    return _convert_arrays(path, stored, {tensor: names[tensor.name] for tensor in expected}), ()


def _describe_weights(
    contents: _Contents,
    stored: Mapping[str, np.ndarray],
    expected: Mapping[Tensor, str],
    has_classifier: bool,
) -> Iterator[str]:
    if contents.weights in _AVERAGES:
        yield f"its only weights are a moving average ({contents.weights})"
    if not has_classifier:
        yield (
            "it has no classifier (fc.weight, fc.bias), so it names no classes; training can start"
            " from it"
        )
    yield from describe_converted(find_converted(expected.values(), stored), "tensors")


def _find_origin(
    path: Path, root: Mapping[Any, Any], stored: Any, prefix: str, trained: list[Tensor]
) -> str:
    """Return the program that wrote a file, by its names of tensors, modules and values, and by its
    own name."""
    for name in stored:
        if not isinstance(name, str):
            continue
        is_nvidias = any(part in name for part in _NVIDIA_SQUEEZES)
        if is_nvidias or _strip_wrappers(name).startswith(f"{prefix}layers."):
            return NVIDIA
    sizes = [len(group["params"]) for group in list_groups(root.get(OPTIMIZER))]
    nvidia_sizes = list(map(len, split_nvidia_groups(trained)))
    if path.name.startswith("nvidia_") or sizes == nvidia_sizes:
        return NVIDIA
    modules = set()
    for name in getattr(stored, "modules", ()):
        modules.add(_strip_wrappers(name).removeprefix(prefix))
    has_timms_keys = {"arch", "args", "version"} <= root.keys()
    if modules & {"act1", "global_pool"} or has_timms_keys or path.name == "pytorch_model.bin":
        return "timm"
    has_modules = {"relu", "avgpool", "layer1.0.relu"} <= modules
    has_keys = {"model", "args", "lr_scheduler"} <= root.keys()
    if has_modules or has_keys or _OF_TORCHVISION.fullmatch(path.name):
        return "torchvision"
    return "PyTorch"


def _choose_recipe(path: Path, origin: str, matching: Matching) -> Recipe:
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
    if matching.spec.groups > 1:
        return recipe
    # configs.yml: ResNet-50 is trained with another batch and weight decay.
    return recipe.replace(global_batch_images=2048, weight_decay=1 / 32768)
