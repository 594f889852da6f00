"""Folders of timm and of its models on the Hugging Face Hub.

    config.json           the model, its preprocessing and the names of its classes (`timm_config`)
    model.safetensors     the weights by torchvision's names, and `num_batches_tracked` of every batch norm
    pytorch_model.bin     the same, as PyTorch saves it; read only if there is no model.safetensors, as timm does

Sources: timm 1.0.31, models/_hub.py and models/_helpers.py.
"""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialise

from lockstep.models.architectures import model_spec, tensors
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe
from lockstep.recipes.recipe import own_geometry
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing_folder, write_bytes, write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import parsed
from lockstep.weights import checkpoint
from lockstep.weights.formats import dtype_name, numbers, refuse_existing
from lockstep.weights.formats.common import COUNTERS, Written, check_state, redirect_file
from lockstep.weights.formats.stand_ins import refuse_stand_in
from lockstep.weights.formats.timm_config import build_timm_config, read_timm_config
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays

NAME = "timm"

CONFIG = "config.json"
_SAFE, _PICKLED = FILES = ("model.safetensors", "pytorch_model.bin")
_COUNTER = "num_batches_tracked"


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file belongs to timm's folder."""
    return find(path) is not None


def find(path: Path) -> Path | None:
    """Return the weights file of timm's folder that a path names; None if it names none.

    A path is the folder, its `config.json`, or one of its two weights files. A `config.json` that
    names no `architecture` is another program's. Raises `CheckpointError` if `config.json` cannot
    be read, or has no weights next to it.
    """
    folder = path if path.is_dir() else path.parent
    named = path.name in (CONFIG, _SAFE, _PICKLED) and path.is_file()
    if (
        not (path.is_dir() or named)
        or not (folder / CONFIG).is_file()
        or not _is_timms(_config(folder))
    ):
        return None
    if path.name in (_SAFE, _PICKLED) and not path.is_dir():
        return path
    for name in (_SAFE, _PICKLED):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder / CONFIG} is of timm, but its weights are missing; expected {_SAFE} or {_PICKLED}"
    )


def _config(folder: Path) -> Any:
    try:
        data = read_regular(folder / CONFIG, TEXT)
        refuse_stand_in(folder / CONFIG, data)
        return parsed(data)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read as JSON: {error}") from None


def _is_timms(config: Any) -> bool:
    return isinstance(config, dict) and ("architecture" in config or "pretrained_cfg" in config)


def read(path: Path, *, momentum: bool = True) -> Weights:
    """Read the weights file that `find` returns, and the `config.json` next to it. There are no
    velocities.

    The recipe has the model and the preprocessing of `config.json`, in fp32; the state is of step
    0. Raises `CheckpointError` if a file is damaged, or if the model or its preprocessing is not
    supported.
    """
    config = _config(path.parent)
    if not _is_timms(config):
        raise CheckpointError(
            f"{path.parent / CONFIG} is not of timm; expected a table with architecture"
        )
    try:
        changes, classes, remarks = read_timm_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent / CONFIG}: {error}") from None
    recipe = Recipe(precision="fp32").replace(**changes)
    arrays = _stored(path)
    stored = {name: value for name, value in arrays.items() if name.rpartition(".")[2] != _COUNTER}
    outputs = stored["fc.bias"].shape if "fc.bias" in stored else ()
    if outputs and outputs != (recipe.logits,):
        raise CheckpointError(
            f"{path} has {outputs[0]} classes, but num_classes of {CONFIG} is {recipe.logits}"
        )
    check_fit(
        {each.name: each.shape for each in tensors(model_spec(recipe.model), recipe.logits)},
        stored,
        str(path),
    )
    missing = ("there are no velocities",) if momentum else ()
    state = State(0, {name: _canonical(path, name, value) for name, value in stored.items()}, {})
    held = list_arrays(describe_arrays(arrays), zip(stored, stored, strict=True))
    remarks = (*remarks, *_converted(stored), *missing)
    others = (path.parent / CONFIG,)
    return Weights(
        recipe,
        state,
        classes,
        path,
        NAME,
        remarks,
        has_preprocessing=True,
        stored=held,
        others=others,
    )


def _stored(path: Path) -> Mapping[str, np.ndarray]:
    if path.suffix == ".safetensors":
        return checkpoint.read_weights(path, as_stored=True)[0]
    found = importlib.import_module("lockstep.weights.formats.torch_file").load(path)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in found.items()
    ):
        raise CheckpointError(
            f"{path} holds other values than tensors by name; expected a state_dict, as timm"
            " saves it"
        )
    return found


def _canonical(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    found = numbers(values)
    if found.dtype.kind != "f":
        raise CheckpointError(f"{path}: {name} is {dtype_name(values.dtype)}; expected float32")
    return np.array(found, np.float32, order="C")


def _converted(stored: Mapping[str, np.ndarray]) -> Iterator[str]:
    odd = [name for name, value in stored.items() if value.dtype != np.float32]
    if odd:
        yield (
            f"{len(odd)} tensors, such as {odd[0]}, are {dtype_name(stored[odd[0]].dtype)} and were"
            " converted to float32"
        )


def write(
    target: Path,
    recipe: Recipe,
    state: State,
    classes: tuple[str, ...],
    into: Path | None = None,
    *,
    certified: bool = True,
) -> Written:
    """Write a new folder for timm and the Hub; return its files and remarks on what they do not
    hold.

    The folder appears only when it is complete. `num_batches_tracked` is the state's step. `into`
    is as in `write_new`. If there will be no certificate (`certified` is false), the metadata of
    the weights says so. Raises `CheckpointError` if the folder exists, if timm has no such model,
    or if it cannot be written.
    """
    refuse_existing(target)
    config = build_timm_config(recipe, classes)
    weights = _weights(recipe, state)
    # The metadata of PyTorch, without which some readers refuse the file.
    metadata = {"format": "pt"} | ({} if certified else {"certificate": "none"})
    try:
        with appearing_folder(redirect_file(target, into)) as unfinished:
            unfinished.mkdir()
            write_bytes(unfinished / _SAFE, serialise(weights, metadata=metadata))
            write_json(unfinished / CONFIG, config)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from None
    return Written(
        (target / CONFIG, target / _SAFE),
        (target / _SAFE,),
        tuple(_not_carried(recipe, state)),
        COUNTERS,
    )


def _weights(recipe: Recipe, state: State) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for tensor in check_state(model_spec(recipe.model), recipe.logits, state):
        found[tensor.name] = np.ascontiguousarray(state.tensors[tensor.name], np.float32)
        if tensor.role == "bn_var":
            found[f"{tensor.name.rpartition('.')[0]}.{_COUNTER}"] = np.array(state.step, np.int64)
    return found


def _not_carried(recipe: Recipe, state: State) -> Iterator[str]:
    if not recipe.eval_antialias:
        yield (
            "timm's resize filters when it shrinks an image; these weights are evaluated with"
            " eval_antialias: false"
        )
    if own := ", ".join(f"{name}: {value}" for name, value in own_geometry(recipe).items()):
        yield (
            "timm's resize and crop round and sample as torchvision's; these weights are evaluated"
            f" with {own}"
        )
    if recipe.dct_scaling:
        yield "timm decodes JPEGs at full size; these weights are evaluated with dct_scaling"
    if recipe.exif_orientation:
        yield (
            "timm uses photos as they are stored; these weights are evaluated with exif_orientation"
        )
    if recipe.padding == "same":
        yield (
            "timm's models pad symmetrically; these weights were trained with TensorFlow's SAME"
            " padding"
        )
    if recipe.bn_epsilon != 1e-5:
        yield (
            "timm's batch norm adds 1e-05 to the variance; these weights were trained with"
            f" {recipe.bn_epsilon}"
        )
    if state.momentum:
        yield "velocities were left out, since the folder holds only weights"
