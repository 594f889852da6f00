"""Open trained weights of any origin: a run, a checkpoint, or a file of another program."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.models.architectures import MODELS, ModelSpec, model_spec
from lockstep.models.state import State
from lockstep.system.errors import CheckpointError, nearest
from lockstep.weights.choosing import choose_weights
from lockstep.weights.formats import lockstep_files
from lockstep.weights.known_preprocessing import assume_preprocessing
from lockstep.weights.opened_weights import LOCKSTEP, Weights
from lockstep.weights.preprocessing import (
    Changes,
    Preprocessing,
    check_preprocessing,
    read_certified_preprocessing,
    set_preprocessing,
)
from lockstep.weights.recognition import recognise
from lockstep.weights.remote_weights import locate_weights
from lockstep.weights.weights_choice import DEFAULT_CHOICE


def open_weights(
    path: str | Path,
    *,
    checkpoint: str | None = None,
    ema: bool | None = None,
    momentum: bool = False,
    model: str | None = None,
    needs_classifier: bool = True,
    preprocessing: Preprocessing | None = None,
) -> Weights:
    """Return the weights of a run, a checkpoint folder, a file, or weights somewhere else by their
    name (`lockstep.weights.remote_weights`).

    - `checkpoint` is "newest", "best" or a step's number of a run. By default the best one is used,
      or the newest one of a run that was never evaluated; a remark says which.
    - With `ema`, the weights are the moving average instead of the trained weights. By default they
      are whichever is better of a run's best checkpoint, else the trained weights.
    - With `momentum`, the state also has the velocities, the moving average and the loss scale, as
      far as the source has them.
    - `model` names the model of a file that fits several, such as resnet50 and resnet50-v1.
    - Weights without a classifier are refused, unless `needs_classifier` is false. Then `fc.weight`
      and `fc.bias` are missing.
    - `preprocessing` has fields of the recipe that say how images are prepared
      (`preprocessing.SETTABLE`), or is a recipe whose evaluation is used. It takes precedence
      over what the file says.

    The format of another program's file is recognised by its content
    (docs/reference/weight-formats.md). Its recipe is the published one of the model, in fp32.
    Raises `CheckpointError`, and `RecipeError` if `preprocessing` does not fit.
    """
    settings = check_preprocessing(preprocessing)
    path = locate_weights(path)
    try:
        choice = choose_weights(path, checkpoint, ema)
        path = choice.path
        # float64 values beyond float32 become infinite, as --inspect shows.
        with np.errstate(over="ignore"):
            weights = _read(path, settings, ema=choice.ema, momentum=momentum)
            weights = _make_printable(weights.add_remarks(*choice.remarks))
    except OSError as error:
        raise CheckpointError(f"{path!s:.200} cannot be read: {error.strerror or error}") from None
    if needs_classifier and not weights.has_classifier:
        raise CheckpointError(
            f"{weights.source} has no classifier, so it cannot classify images; train one: lockstep"
            f" train --weights {path}"
        )
    recipe, remarks = set_preprocessing(weights.recipe, settings)
    weights = replace(weights, recipe=recipe).add_remarks(*remarks, *_describe_not_finite(weights))
    return weights if model is None else _compute_as(weights, model)


def _read(path: Path, settings: Changes, *, ema: bool, momentum: bool) -> Weights:
    """Return the weights of a checkpoint or a file. The preprocessing in `settings` is known."""
    if lockstep_files.is_checkpoint(path):
        return lockstep_files.read_checkpoint(path, ema=ema, momentum=momentum)
    format, place = recognise(path)
    weights = format.read(place, momentum=momentum or ema, choice=DEFAULT_CHOICE)
    if ema:
        if not weights.state.ema:
            is_own = weights.origin == LOCKSTEP
            hint = "it is a separate file, ema.safetensors" if is_own else "leave out --ema"
            raise CheckpointError(f"{place} has no moving average; {hint}")
        weights = replace(weights, state=State(weights.state.step, weights.state.ema, {}))
    return _complete_preprocessing(weights, settings)


def _complete_preprocessing(weights: Weights, settings: Changes) -> Weights:
    """Return weights with the preprocessing that their file does not have, from its certificate or
    as an assumption. A remark on an assumption leaves out the fields of `settings`."""
    if weights.has_preprocessing:
        return weights
    changes, remarks = read_certified_preprocessing(weights.source)
    if not changes:
        changes, assumptions = assume_preprocessing(weights.origin, settings)
        remarks = (*remarks, *assumptions)
    if changes:
        weights = replace(weights, recipe=weights.recipe.replace(**changes))
    return weights.add_remarks(*remarks)


def _make_printable(weights: Weights) -> Weights:
    """Return weights whose classes, remarks and arrays have names that every encoding can write."""
    stored = [replace(array, name=escape_halves(array.name)) for array in weights.stored]
    return replace(
        weights,
        classes=make_printable_names(weights.classes),
        remarks=tuple(map(escape_halves, weights.remarks)),
        stored=tuple(stored),
    )


def make_printable_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of classes as opened weights have them."""
    return tuple(map(escape_halves, names))


def escape_halves(text: str) -> str:
    """Return a text with half a UTF-16 character, which no encoding can write, spelled out."""
    return text.encode(errors="backslashreplace").decode()


def _describe_not_finite(weights: Weights) -> tuple[str, ...]:
    """Return a remark that names the first tensor with NaN or infinite values; none if there are
    none."""
    counts = {
        name: value.size - int(np.isfinite(value).sum()) for name, value in weights.tensors.items()
    }
    affected = [name for name, count in counts.items() if count]
    if not affected:
        return ()
    total = sum(value.size for value in weights.tensors.values())
    return (
        f"{sum(counts.values()):,} of {total:,} values are NaN or infinite, in {len(affected)} of"
        f" {len(counts)} tensors; the first is {affected[0]}, with {counts[affected[0]]:,}: what is"
        " computed with them may not be finite",
    )


def _compute_as(weights: Weights, model: str) -> Weights:
    """Return weights as another model with the same tensors. Raises `CheckpointError` if the
    tensors are not its."""
    if model not in MODELS:
        raise CheckpointError(f"there is no model {model!r}. {nearest(model, MODELS)}")
    recipe = weights.recipe
    if recipe.model == model:
        return weights
    if _list_shapes(recipe.model, recipe.logits) != _list_shapes(model, recipe.logits):
        raise CheckpointError(
            f"{weights.source} holds {recipe.fields()['model']}, whose tensors are not those of"
            f" {model}"
        )
    name = recipe.model if isinstance(recipe.model, str) else "another model"
    return replace(weights, recipe=recipe.replace(model=model)).add_remarks(
        f"computes as {model}, as requested; without --model it is {name}"
    )


def _list_shapes(model: str | ModelSpec, logits: int) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in model_spec(model).list_tensors(logits)}
