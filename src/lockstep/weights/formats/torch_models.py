"""ResNets in PyTorch's files, as torchvision, timm and NVIDIA's code save them: conversion to
canonical names.

Names of tensors are torchvision's or timm's, which are the canonical ones. `torch_contents` finds
the network in a file, `torch_values` reads the values next to it, and `torch_training` what
continues a training.

v1 and v1.5 have the same tensors; such a file is taken for v1.5, as NVIDIA's, torchvision's and
timm's models are. timm's blur has no tensors; such a file is taken for a model without blur, unless
it is one of the known weights, or says the name of its network.

Sources: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: models/resnet.py,
models/model.py, models/common.py, training.py, configs.yml; torchvision's models/resnet.py and
references/classification/train.py; timm's models/resnet.py and checkpoint_saver.py; FFCV's
ffcv-imagenet, train_imagenet.py.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnext101_32x4d_pytorch_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.strict_json import is_text
from lockstep.weights.formats import (
    common,
    numbers,
    torch_contents,
    torch_file,
    torch_values,
    training_scripts,
)
from lockstep.weights.formats.account import Part, check_outputs, refuse_leftover
from lockstep.weights.formats.table import OIHW, Table, fetch, list_shapes, name_network
from lockstep.weights.formats.torch_contents import NVIDIA_SQUEEZES, Contents, Network
from lockstep.weights.formats.torch_settings import list_values
from lockstep.weights.formats.torch_values import Values
from lockstep.weights.known_preprocessing import find_published
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.preprocessing import FIELDS, Changes
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "PyTorch"

_ENDINGS = (".pth", ".pth.tar", ".pt", ".bin")
_OF_FOLDER = ("checkpoint.pth.tar", "last.pth.tar", "model_best.pth.tar", "pytorch_model.bin")
"""Files that stand for their folder: the last checkpoint of NVIDIA's code and of timm, the best
one, a model of a hub."""
_LOGITS = 1000
_PROJECTING = re.compile(r"encoder_[qk]\.")
"""Networks of MoCo, whose classifier is a projection."""
_WITHOUT_CLASSIFIER = (
    "it has no classifier (fc.weight, fc.bias), so it names no classes; training can start from it"
)
_OF_NVIDIA = re.compile(r"^layers\.|\.squeeze\.(?:squeeze|expand)\.", re.MULTILINE)
_TIMMS_KEYS = {"arch", "args", "version"}
"""What the checkpoints of timm's training script have, and a module's weights do not."""
_OF_TORCHVISION = re.compile(r"resnet\d+-[0-9a-f]{8}\.pth")
"""The names of the files that torchvision downloads."""
_LAYOUT = {**OIHW, "squeeze": ("OIHW", "OI")}
"""1x1 convolutions of squeeze-and-excitation may be dense layers."""


matches = torch_file.is_torch_file


def find(path: Path) -> Path | None:
    """Return the PyTorch file that a path names; None if there is none.

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
    without = None if momentum else partial(_list_unneeded, choice=choice)
    return read_state_dict(
        path, torch_file.load(path, without=without), momentum=momentum, choice=choice
    )


def _list_unneeded(value: Any, choice: WeightsChoice) -> tuple[str, ...]:
    """Return the keys of what is not needed for the weights alone."""
    if not isinstance(value, dict) or torch_contents.is_state_dict(value):
        return ()
    for key in torch_contents.WEIGHTS:
        if torch_contents.is_state_dict(value.get(key)) and not choice.is_ignored(key):
            return (training_scripts.OPTIMIZER, *torch_contents.AVERAGES)
    return (training_scripts.OPTIMIZER,)


def read_state_dict(
    path: Path, value: Any, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE
) -> Weights:
    """Return what `read` returns, of the value that the file `path` holds: a state_dict, or a
    checkpoint with one."""
    contents = torch_contents.find_weights(path, value, choice)
    root = contents.root
    stored = root[contents.weights]
    arrays = torch_contents.list_named_arrays(stored)
    is_alone = root.keys() == {contents.weights}
    published = dict((is_alone and find_published(path)) or {})
    try:
        network = torch_contents.find_network(path, stored, choice)
        rest, ignored = list_values(root, (contents.weights, contents.average), choice)
        model = choice.model or published.get("model") or torch_values.find_model(path, root, rest)
        matching = _match_model(path, stored, network, replace(choice, model=model))
        changes, used, remarks = torch_values.read_changes(path, root, rest)
        if published:
            network.silent.clear()
        parts = _account_for_rest(path, rest, network, matching, used)
    except CheckpointError as error:
        raise torch_contents.name_kind(path, error, arrays, root) from None
    if prefix := network.prefix:
        remarks.insert(0, f"tensor names begin with {prefix!r:.60}, which was removed")
    places = list(network.names)
    expected = {t: name for t, name in matching.map_tensors().items() if t.name in places}
    trained = [tensor for tensor in expected if tensor.is_trained]
    trained.sort(key=lambda tensor: places.index(tensor.name))
    origin = _find_origin(path, root, stored, prefix, trained)
    epochs, about_epoch = training_scripts.read_epochs(root, origin)
    velocities: dict[str, np.ndarray] = {}
    average: dict[str, np.ndarray] = {}
    if momentum and not is_alone:
        optimizer = root.get(training_scripts.OPTIMIZER)
        velocities, about_velocities = training_scripts.read_velocities(optimizer, trained)
        average, about_average = _read_average(path, contents, list(expected), choice)
        remarks += [about_epoch, *about_average, *about_velocities]
    classes, about_classes = torch_values.read_classes(root, matching.logits)
    if not network.has_classifier:
        classes = ()
        about_classes = [_WITHOUT_CLASSIFIER]
    remarks += _describe_averages(contents, momentum=momentum)
    converted = common.find_converted(expected.values(), arrays)
    changes |= network.colours | published
    values = fetch(Table.of(path, arrays), _LAYOUT, expected)
    return Weights(
        _choose_recipe(path, origin, matching, changes),
        State(0, values, velocities, average, training_scripts.read_scaler(root)),
        classes,
        path,
        origin,
        (*remarks, *about_classes, *common.describe_converted(converted, "tensors")),
        epochs,
        stated=frozenset(changes).intersection(FIELDS),
        assumed_as=_choose_assumption(origin, root),
        parts=(*contents.parts, *network.parts, *ignored, *parts),
        stored=list_arrays(describe_arrays(arrays), zip(values, expected.values(), strict=True)),
    )


def _describe_averages(contents: torch_contents.Contents, *, momentum: bool) -> list[str]:
    """Return remarks on moving averages that are used, or are not read."""
    if contents.weights in torch_contents.AVERAGES:
        return [f"its only weights are a moving average ({contents.weights})"]
    if contents.average is None or momentum:
        return []
    return [
        f"the moving average ({contents.average}) is not used; evaluate, predict, export and"
        " convert use it with --ema"
    ]


def _account_for_rest(
    path: Path, values: Values, network: Network, matching: common.Matching, used: Collection[str]
) -> tuple[Part, ...]:
    """Return what becomes of the values of a file. Raises `CheckpointError` that names values and
    modules that may change the results of its network."""
    model = f"{NAME}'s {matching.model}"
    silent = network.silent
    if matching.spec.blur == "after":
        silent = [name for name in silent if not name.endswith("maxpool.1")]
    if silent:
        problem = "also has modules without tensors that Lockstep would ignore"
        if network.is_guess:
            problem = "has a Sequential that may contain more modules"
        used = list(map(torch_contents.strip_wrappers, network.names.values()))
        raise refuse_leftover(path, model, silent, problem, used=used)
    logits = None
    if network.has_classifier:
        logits = matching.logits
    return tuple(torch_values.account_for_values(path, model, values, used, logits))


def to_nvidia_name(name: str) -> str:
    """Return the name of a canonical tensor in NVIDIA's code.

    >>> to_nvidia_name("layer1.0.downsample.0.weight")
    'layers.0.0.downsample.0.weight'
    """
    for nvidias, own in NVIDIA_SQUEEZES.items():
        name = name.replace(own, nvidias)
    return re.sub(r"^layer([1-4])\.", lambda match: f"layers.{int(match[1]) - 1}.", name)


def _check_blur_filters(path: Path, stored: Mapping[Any, Any]) -> dict[str, common.Shape]:
    """Return the shapes of FFCV's filters of blurs, by name. Raises `CheckpointError` if they are
    not those of Lockstep's blur."""
    line = np.array([0.25, 0.5, 0.25])
    shapes = {}
    for name, values in torch_contents.list_named_arrays(stored).items():
        if not torch_contents.is_blur_filter(name):
            continue
        if values.shape[1:] != (1, 3, 3) or (numbers(values) != line[:, None] * line).any():
            raise CheckpointError(
                f"{path}: {name} is a filter other than (1, 2, 1) x (1, 2, 1) / 16, which Lockstep"
                " does not have"
            )
        shapes[name] = values.shape
    return shapes


def _match_model(
    path: Path, stored: Mapping[str, np.ndarray], network: Network, choice: WeightsChoice
) -> common.Matching:
    """Return the model that has exactly the tensors of a network."""
    names = network.names
    shapes = {name: stored[name].shape for name in names.values()}
    rename: Callable[[str], str] = str
    if re.search(r"layers\.[0-3]\.", " ".join(shapes)):
        rename = to_nvidia_name
    blurs = _check_blur_filters(path, stored)
    matchings = []
    for model, spec in choice.list_models().items():
        if choice.model is None and spec.blur == "before" and not blurs:
            continue
        others = {} if spec.blur == "before" else dict(blurs)
        if not network.has_classifier:
            others |= {"fc.weight": (_LOGITS, spec.features), "fc.bias": (_LOGITS,)}
        table = {}
        for tensor in spec.list_tensors(_LOGITS):
            table[tensor.name] = names.get(tensor.name, rename(tensor.name))
        matchings.append(common.match_model((model, spec), table, shapes | others, _list_shapes))
    matching = common.choose_model(matchings, path, NAME, names.values())
    if network.has_classifier:
        if _PROJECTING.search(network.prefix):
            raise refuse_leftover(path, "an encoder", [names["fc.weight"], names["fc.bias"]])
        check_outputs(path, matching.logits)
    return matching


_list_shapes = partial(list_shapes, _LAYOUT)


def _read_average(
    path: Path, contents: Contents, expected: list[Tensor], choice: WeightsChoice
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the moving average next to the weights, and remarks on it. One that does not fit is
    left out."""
    if contents.average is None:
        return {}, ()
    stored = contents.root[contents.average]
    names = torch_contents.find_network(path, stored, choice).names
    fits = names.keys() == common.map_shapes(expected).keys() and all(
        stored[names[tensor.name]].shape in _list_shapes(tensor) for tensor in expected
    )
    if not fits:
        return {}, (
            f"the moving average ({contents.average}) does not match the weights and was left out",
        )
    table = Table.of(path, torch_contents.list_named_arrays(stored))
    return fetch(table, _LAYOUT, {t: names[t.name] for t in expected}), ()


def _find_origin(
    path: Path, root: Mapping[Any, Any], stored: Any, prefix: str, trained: list[Tensor]
) -> str:
    """Return the program that wrote a file, by its names of tensors, modules and values, and by its
    own name."""
    if torch_contents.are_transformers(stored):
        return "transformers"
    names = map(torch_contents.strip_wrappers, filter(is_text, stored))
    lines = "\n".join(name.removeprefix(prefix) for name in names)
    sizes = [
        len(group["params"])
        for group in training_scripts.list_groups(root.get(training_scripts.OPTIMIZER))
    ]
    is_nvidias = sizes == list(map(len, training_scripts.split_nvidia_groups(trained)))
    if is_nvidias or _OF_NVIDIA.search(lines) or path.name.startswith("nvidia_"):
        return training_scripts.NVIDIA
    modules = set()
    for name in map(torch_contents.strip_wrappers, getattr(stored, "modules", ())):
        modules.add(name.removeprefix(prefix))
    has_name = path.name == "pytorch_model.bin"
    if modules & {"act1", "global_pool"} or root.keys() >= _TIMMS_KEYS or has_name:
        return "timm"
    has_modules = {"relu", "avgpool", "layer1.0.relu"} <= modules
    has_keys = {"model", "args", "lr_scheduler"} <= root.keys()
    if has_modules or has_keys or _OF_TORCHVISION.fullmatch(path.name):
        return "torchvision"
    return "PyTorch"


def _choose_assumption(origin: str, root: Mapping[Any, Any]) -> str:
    """Return `Weights.assumed_as`."""
    # In safetensors the same tensors do not name their modules: how images are prepared must not
    # depend on these.
    return NAME if origin == "timm" and not root.keys() >= _TIMMS_KEYS else ""


def _choose_recipe(path: Path, origin: str, matching: common.Matching, changes: Changes) -> Recipe:
    """Return NVIDIA's recipe for its own model, else the default; in fp32, with the changes that
    the file says. Raises `CheckpointError` if none is possible."""
    recipe = Recipe()
    if origin == training_scripts.NVIDIA:
        recipe = resnext101_32x4d_pytorch_90ep()
        if matching.spec.groups == 1:
            # configs.yml: ResNet-50 is trained with another batch and weight decay.
            recipe = recipe.replace(global_batch_images=2048, weight_decay=1 / 32768)
    changes |= {"model": name_network(matching), "logits": matching.logits, "precision": "fp32"}
    try:
        return recipe.replace(**changes)
    except RecipeError as error:
        raise CheckpointError(f"{path}: {error}") from None
