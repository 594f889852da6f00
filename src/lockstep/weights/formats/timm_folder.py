"""Folders of timm and of its models on the Hugging Face Hub.

    config.json           the model, its preprocessing and the names of its classes (`timm_config`)
    model.safetensors     the weights by torchvision's names, and a counter of every batch norm
    pytorch_model.bin     the same, as PyTorch saves it

As in timm, `pytorch_model.bin` is read only if there is no `model.safetensors`.

Sources: timm 1.0.31, models/_hub.py and models/_helpers.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialise

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.recipe import own_geometry
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing_folder, write_bytes, write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import parsed
from lockstep.weights import checkpoint
from lockstep.weights.formats import naming_target, refuse_existing, timm_config, torch_file
from lockstep.weights.formats.account import split_ignored
from lockstep.weights.formats.common import COUNTERS, Written, check_state, redirect_file
from lockstep.weights.formats.foreign_safetensors import add_metadata
from lockstep.weights.formats.lfs_pointers import refuse_stand_in
from lockstep.weights.formats.torch_models import read_state_dict
from lockstep.weights.formats.torch_writer import build_state_dict, describe_model
from lockstep.weights.opened_weights import Weights
from lockstep.weights.preprocessing import FIELDS
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "timm"

CONFIG = "config.json"
_SAFE, _PICKLED = FILES = ("model.safetensors", "pytorch_model.bin")


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file belongs to timm's folder."""
    return find(path) is not None


def find(path: Path) -> Path | None:
    """Return the weights file of a timm folder that a path names; None if there is none.

    A `config.json` that names no `architecture` is another program's. Raises `CheckpointError` as
    `find_weights` does.
    """
    return find_weights(path, NAME, _is_timms)


def find_weights(path: Path, program: str, is_its: Callable[[Any], bool]) -> Path | None:
    """Return the weights file of a hub's folder that a path names, if its `config.json` is one of a
    program; None otherwise.

    A path is the folder, its `config.json`, or one of its two weights files. Raises
    `CheckpointError` if `config.json` cannot be read, or has no weights next to it.
    """
    folder = path if path.is_dir() else path.parent
    is_named = path.name in (CONFIG, *FILES) and path.is_file()
    if not path.is_dir() and not is_named:
        return None
    if not (folder / CONFIG).is_file() or not is_its(read_json(folder / CONFIG)):
        return None
    if path.name in FILES and not path.is_dir():
        return path
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder / CONFIG} belongs to {program}, but its weights are missing; expected {_SAFE} or"
        f" {_PICKLED}"
    )


def read_json(path: Path) -> Any:
    """Return what a configuration holds. Raises `CheckpointError` if it is no JSON."""
    try:
        data = read_regular(path, TEXT)
        refuse_stand_in(path, data)
        return parsed(data)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None


def read_arrays(path: Path) -> Any:
    """Return what a weights file of a hub's folder holds, as it is stored."""
    if path.suffix == ".safetensors":
        return add_metadata(path, checkpoint.read_weights(path, as_stored=True)[0])
    return torch_file.load(path)


def _is_timms(config: Any) -> bool:
    return isinstance(config, dict) and ("architecture" in config or "pretrained_cfg" in config)


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read the weights file that `find` returns, and the `config.json` next to it. There are no
    velocities.

    The recipe has the model and the preprocessing of `config.json`, in fp32; the state is of step
    0. Raises `CheckpointError` if a file is damaged, or if the model or its preprocessing is not
    supported.
    """
    config = read_json(path.parent / CONFIG)
    if not _is_timms(config):
        raise CheckpointError(
            f"{path.parent / CONFIG} is not timm's; expected a table with architecture"
        )
    try:
        fields, ignored = split_ignored(timm_config.merge_layouts(config), choice)
        changes, classes, about = timm_config.read_timm_config(fields, choice.model)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent / CONFIG}: {error}") from None
    stored = read_arrays(path)
    weights = read_state_dict(path, stored, choice=replace(choice, model=changes["model"]))
    logits = weights.recipe.logits
    if weights.has_classifier and logits != changes["logits"]:
        raise CheckpointError(
            f"{path} has {logits} classes, but num_classes of {CONFIG} is {changes['logits']}"
        )
    if weights.stated:
        raise CheckpointError(
            f"{path} has a module that normalises images, but {CONFIG} says how they are prepared"
        )
    changes["model"] = weights.recipe.model
    remarks = [*about, *weights.remarks]
    if momentum:
        remarks.append("there are no velocities")
    return replace(
        weights,
        recipe=Recipe(precision="fp32").replace(**changes),
        classes=classes,
        origin=NAME,
        remarks=tuple(remarks),
        stated=frozenset(FIELDS),
        parts=(*weights.parts, *ignored),
        preprocessing_from=dict.fromkeys(timm_config.list_assumed(fields), "assumed"),
        others=(path.parent / CONFIG,),
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
    config = timm_config.build_timm_config(recipe, classes)
    expected = check_state(recipe.spec, recipe.logits, state)
    weights = build_state_dict(expected, state.tensors, step=state.step)
    files = {CONFIG: config}
    written = write_folder(target, weights, files, into, certified=certified)
    return replace(written, remarks=tuple(_describe_differences(recipe, state)))


def write_folder(
    target: Path,
    weights: Mapping[str, np.ndarray],
    files: Mapping[str, Any],
    into: Path | None,
    *,
    certified: bool,
) -> Written:
    """Write a new folder of a hub: weights, and the values of its JSON files by name. It appears
    when it is complete. Raises `CheckpointError` if it exists or cannot be written."""
    refuse_existing(target)
    arrays = {name: np.asarray(array, order="C") for name, array in weights.items()}
    # The metadata of PyTorch, without which some readers refuse the file.
    metadata = {"format": "pt"}
    if not certified:
        metadata["certificate"] = "none"
    with naming_target(target), appearing_folder(redirect_file(target, into)) as unfinished:
        unfinished.mkdir()
        write_bytes(unfinished / _SAFE, serialise(arrays, metadata=metadata))
        for name, values in files.items():
            write_json(unfinished / name, values)
    paths = tuple(target / name for name in (*files, _SAFE))
    return Written(paths, (target / _SAFE,), (), COUNTERS)


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    if not recipe.eval_antialias:
        yield "timm's resize filters when shrinking; these weights have eval_antialias: false"
    geometry = ", ".join(f"{name}: {value}" for name, value in own_geometry(recipe).items())
    if geometry:
        yield (
            "timm's resize and crop round and sample as torchvision's; these weights are evaluated"
            f" with {geometry}"
        )
    if recipe.dct_scaling:
        yield "timm decodes JPEGs at full size; these weights are evaluated with dct_scaling"
    if recipe.exif_orientation:
        yield "timm does not rotate photos; these weights are evaluated with exif_orientation"
    yield from describe_model(recipe, "timm's model")
    if state.momentum:
        yield "velocities were left out, since the folder holds only weights"
