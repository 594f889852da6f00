"""Lockstep's own weights: a checkpoint folder, or a safetensors file.

The metadata has the recipe, the names of the classes and perhaps scales of quantisation, the
temperature of probabilities, the names of what a user left out of another program's file, and the
fields of the preprocessing that were assumed for it.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.quantisation import Scales, check_scales
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe, load_recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.event_log import read_log
from lockstep.system.strict_json import is_list_of, is_number, is_text
from lockstep.weights import checkpoint
from lockstep.weights.calibration import KEY, UNCALIBRATED, parse_calibration, read_calibration
from lockstep.weights.formats import dtype_name, is_safetensors, numbers, refuse_existing
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.common import map_shapes, redirect_file
from lockstep.weights.opened_weights import LOCKSTEP, Weights, describe_arrays, list_arrays
from lockstep.weights.preprocessing import FIELDS, list_assumed
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = LOCKSTEP

_IGNORED = "ignored"
"""The key of the names of what a user left out of another program's file."""
_ASSUMED = "assumed"
"""The key of the fields of the preprocessing that another program's file did not say."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file is of safetensors and has Lockstep's metadata. Raises
    `CheckpointError` if its header is damaged."""
    return is_safetensors(head, path) and checkpoint.read_metadata(path) is not None


def find(path: Path) -> Path | None:
    """Return None: other programs may give a file any of these names."""
    return None


def read(path: Path, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a file, which has no velocities, whatever `momentum` is. Raises `CheckpointError` if it
    is damaged, or not of Lockstep."""
    arrays, metadata = checkpoint.read_weights(path, as_stored=True)
    weights = _build_weights(path, State(0, arrays, {}), metadata or {})
    return _add_calibration(weights, path) if checkpoint.is_weights_file(path) else weights


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is the folder of a checkpoint."""
    return path.is_dir() and ((path / "state.json").exists() or path.name.startswith("step-"))


def read_checkpoint(folder: Path, *, ema: bool, momentum: bool) -> Weights:
    """Return the weights of a checkpoint, or their moving average. Raises `CheckpointError`."""
    state, metadata = checkpoint.load_weights(folder, ema=ema, everything=momentum and not ema)
    weights = _build_weights(folder, state, metadata)
    recipe = weights.recipe.rename(_read_recipe_name(folder))
    weights = _add_calibration(weights, checkpoint.find_weights_file(folder, ema=ema))
    return replace(weights, recipe=recipe, epochs=_count_epochs(folder, state.step))


def _add_calibration(weights: Weights, file: Path) -> Weights:
    """Return the weights of a checkpoint's file with what was found for it later."""
    calibration, remarks = read_calibration(file)
    weights = replace(weights, calibration=calibration, checkpoint_file=file)
    return weights.add_remarks(*remarks)


def write(
    target: Path, weights: Weights, into: Path | None = None, *, certified: bool = True
) -> None:
    """Write a new safetensors file, into the folder `into` if it is given. If there will be no
    certificate (`certified` is false), the metadata says so. Raises `CheckpointError`."""
    check_name(target)
    metadata: dict[str, Any] = {"recipe": weights.recipe.fields(), "classes": list(weights.classes)}
    if weights.scales:
        metadata["scales"] = weights.scales
    if weights.calibration != UNCALIBRATED:
        metadata[KEY] = asdict(weights.calibration)
    if weights.ignored:
        metadata[_IGNORED] = list(weights.ignored)
    if assumed := list_assumed(weights.preprocessing_from):
        metadata[_ASSUMED] = assumed
    if not certified:
        metadata["certificate"] = "none"
    refuse_existing(target)
    checkpoint.write_weights(redirect_file(target, into), weights.tensors, metadata)


def check_name(target: Path) -> None:
    """Raise `CheckpointError` if a new file does not have the ending of its format."""
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the name of a safetensors file ends in .safetensors")


def _read_recipe_name(folder: Path) -> str:
    """Return `based_on` of the recipe of a checkpoint's run; "" if it is unknown."""
    run = folder.parent.parent
    try:
        return load_recipe(run).based_on if (run / "recipe.yaml").is_file() else ""
    except RecipeError:  # the weights are intact, and only this name is missing
        return ""


def _count_epochs(folder: Path, step: int) -> int | None:
    """Return the number of whole epochs of a step, by the log of the checkpoint's run; None if
    there is no such log."""
    log = folder.parent.parent / "log.jsonl"
    if not log.is_file():
        return None
    try:
        starts = [event for event in read_log(log) if event["kind"] == "start"]
    except CheckpointError:  # the weights are intact, and only this number is missing
        return None
    per_epoch = starts[-1].get("steps_per_epoch") if starts else None
    return step // per_epoch if isinstance(per_epoch, int) and per_epoch > 0 else None


def _build_weights(path: Path, state: State, metadata: dict[str, Any]) -> Weights:
    """Return the weights of a state as it is stored, and of Lockstep's metadata."""
    recipe, classes = _read_metadata(path, metadata)
    arrays = state.tensors
    stored = list_arrays(describe_arrays(arrays), zip(arrays, arrays, strict=True))
    converted = {name: _convert(path, name, value) for name, value in arrays.items()}
    state = replace(state, tensors=converted)
    _check_canonical(path, recipe, state)
    scales = read_scales(metadata, recipe, path)
    calibration = UNCALIBRATED
    if KEY in metadata:
        calibration = parse_calibration(metadata[KEY], path)
    return Weights(
        recipe,
        state,
        classes,
        path,
        LOCKSTEP,
        stated=frozenset(FIELDS),
        preprocessing_from=dict.fromkeys(_read_names(metadata, _ASSUMED), "assumed"),
        parts=tuple(Part(name, "ignored") for name in _read_names(metadata, _IGNORED)),
        stored=stored,
        scales=scales,
        calibration=calibration,
    )


def _read_metadata(path: Path, metadata: dict[str, Any]) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe and the names of the classes. Raises `CheckpointError`."""
    try:
        recipe = Recipe.of(metadata["recipe"])
        classes = metadata["classes"]
        if not is_list_of(is_text)(classes):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path}: its metadata does not hold a recipe and a list of classes"
        ) from None
    except RecipeError as error:
        raise CheckpointError(
            f"{path} was written with a recipe that this version cannot read: {error}"
        ) from None
    if len(classes) > recipe.logits:
        raise CheckpointError(
            f"{path} has names of {len(classes)} classes, but its recipe has {recipe.logits}"
        )
    return recipe, tuple(classes)


def _read_names(metadata: dict[str, Any], key: str) -> list[str]:
    """Return a list of names in the metadata; empty if there is none."""
    names = metadata.get(key, [])
    return names if is_list_of(is_text)(names) else []


def read_scales(metadata: dict[str, Any], recipe: Recipe, path: Path) -> Scales:
    """Return the scales in a file's metadata; empty if the recipe is not quantised.

    Raises `CheckpointError` if they are missing or do not fit the recipe's model.
    """
    if recipe.quantisation == "none":
        return {}
    scales = metadata.get("scales")
    if not isinstance(scales, dict) or not all(is_number(value) for value in scales.values()):
        raise CheckpointError(
            f"{path} has no scales, which its recipe's quantisation needs; convert its run again"
        )
    try:
        check_scales(recipe.spec, scales)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {name: float(value) for name, value in scales.items()}


def _convert(path: Path, name: str, value: np.ndarray) -> np.ndarray:
    """Return an array as float32. Raises `CheckpointError` if it does not hold floats."""
    values = numbers(value)
    if values.dtype.kind != "f":
        raise CheckpointError(
            f"{path}, weights: {name} is {dtype_name(value.dtype)}, expected float32; write them"
            " again"
        )
    return values.astype(np.float32, copy=False)


def _check_canonical(path: Path, recipe: Recipe, state: State) -> None:
    """Raise `CheckpointError` unless all parts of a state have the model's tensors in float32."""
    expected = list(recipe.list_tensors())
    trained = [tensor for tensor in expected if tensor.is_trained]
    parts = {"weights": state.tensors, "velocities": state.momentum, "averages": state.ema}
    for part, values in parts.items():
        fitting = trained if part == "velocities" else expected
        if values or part == "weights":
            check_fit(map_shapes(fitting), values, f"{path}, {part}")
        for name, value in values.items():
            if value.dtype != np.float32:
                raise CheckpointError(
                    f"{path}, {part}: {name} is {value.dtype}, expected float32; write them again"
                )
