"""Open trained weights of any origin: a run, a checkpoint, or a file of another program."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import ModelSpec, model_spec
from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.system.text import escape_halves, list_first, make_printable_names
from lockstep.weights.checkpoint_choice import choose_weights
from lockstep.weights.formats import lockstep_files
from lockstep.weights.formats.common import map_shapes
from lockstep.weights.hub import locate_weights, removing_refused
from lockstep.weights.opened_weights import LOCKSTEP, Weights
from lockstep.weights.preprocessing import (
    FIELDS,
    Changes,
    check_preprocessing,
    read_certified_preprocessing,
    set_preprocessing,
)
from lockstep.weights.weights_choice import DESCRIBED, AnySource, WeightsChoice, choose


def open_weights(
    source: AnySource, *, momentum: bool = False, needs_classifier: bool = True, **settings: Any
) -> Weights:
    """Return the weights of a run, a checkpoint folder or a file, or remote weights by their name
    (`lockstep.weights.hub`).

    - `settings` are arguments of `choose`: fields of a `WeightsChoice`.
    - With `momentum`, the state also has the velocities, the moving average and the loss scale, as
      far as the source has them.
    - Weights without a classifier are refused, unless `needs_classifier` is false. Then `fc.weight`
      and `fc.bias` are missing.

    The format of another program's file is recognised by its content
    (docs/reference/weight-formats.md). Its recipe is the published one of the model, in fp32.
    Raises `CheckpointError`, and `RecipeError` if the chosen preprocessing does not fit.
    """
    choice = choose(source, **settings)
    changes = check_preprocessing(choice.preprocessing)
    path = locate_weights(choice.source)
    try:
        located = choose_weights(path, choice.checkpoint, choice.ema)
        path = located.path
        # float64 values beyond float32 become infinite, as --inspect shows.
        with np.errstate(over="ignore"):
            weights = _read(path, choice, ema=located.ema, momentum=momentum)
            weights = _complete_preprocessing(weights, changes)
            weights = _make_printable(weights.add_remarks(*located.remarks))
    except OSError as error:
        raise CheckpointError(f"{path!s:.200} cannot be read: {error.strerror or error}") from None
    if needs_classifier and not weights.has_classifier:
        raise CheckpointError(
            f"{weights.source} has no classifier, so it cannot classify images; train one: lockstep"
            f" train --weights {shlex.quote(str(path))} --data DATA --out RUN"
        )
    recipe, remarks = set_preprocessing(weights.recipe, changes)
    weights = replace(weights, recipe=recipe).add_remarks(*remarks, *_describe_not_finite(weights))
    weights = weights.apply_choice(choice)
    return weights if choice.model is None else _compute_as(weights, choice.model)


def _read(path: Path, choice: WeightsChoice, *, ema: bool, momentum: bool) -> Weights:
    """Return the weights of a checkpoint or a file, as they are there."""
    if lockstep_files.is_checkpoint(path):
        weights = lockstep_files.read_checkpoint(path, ema=ema, momentum=momentum)
    else:
        from lockstep.weights.recognition import recognise

        with removing_refused(path):
            format, place = recognise(path)
            weights = format.read(place, momentum=momentum or ema, choice=choice)
        if ema and not weights.state.ema:
            is_own = weights.origin == LOCKSTEP
            hint = "it is a separate file, ema.safetensors" if is_own else "leave out --ema"
            raise CheckpointError(f"{place} has no moving average; {hint}")
        if ema:
            weights = replace(weights, state=State(weights.state.step, weights.state.ema, {}))
    _check_ignored(weights, choice)
    if not weights.ignored:
        return weights
    return weights.add_remarks(f"left out by --ignore: {list_first(weights.ignored)}")


def _check_ignored(weights: Weights, choice: WeightsChoice) -> None:
    """Raise `CheckpointError` if a pattern leaves out nothing of a file. Lockstep's own files hold
    nothing but their network."""
    ends = set()
    for name in () if weights.origin == LOCKSTEP else weights.ignored:
        # Without a prefix such as `module.`, or the class before a name.
        ends |= {name[i:].strip("'") for i in range(len(name)) if not i or name[i - 1] in " ./'"}
    for pattern in choice.ignore:
        if not any(map(WeightsChoice(ignore=(pattern,)).is_ignored, ends)):
            raise CheckpointError(
                f"--ignore {pattern!r} matches nothing: {weights.source} has no part of this name;"
                " correct the name, or leave out the option"
            )


def _complete_preprocessing(weights: Weights, settings: Changes) -> Weights:
    """Return weights with the preprocessing that their file does not have, from its certificate or
    as an assumption, and with where each value comes from. A remark on an assumption leaves out the
    fields of `settings`, which are set later."""
    certified: Changes = {}
    guesses: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    if not weights.has_preprocessing:
        certified, guesses, remarks = read_certified_preprocessing(weights.source)
    elif weights.origin == "timm":  # its configuration has no place for this
        source, guesses, _ = read_certified_preprocessing(weights.source.parent)
        if source and source["eval_antialias"] != weights.recipe.eval_antialias:
            remarks = (
                "timm's resize filters when shrinking; that of the converted weights did not",
            )
    assumed: Changes = {}
    if not weights.has_preprocessing:
        from lockstep.weights.known_preprocessing import assume_preprocessing

        row = weights.assumed_as or weights.origin
        known = weights.stated | certified.keys()
        assumed, guessed = assume_preprocessing(row, known, settings, weights.recipe.eval_crop)
        remarks += guessed
    changes = {name: v for name, v in (assumed | certified).items() if name not in weights.stated}
    places: dict[str, Any] = dict.fromkeys(certified, "certificate")
    places |= dict.fromkeys(weights.stated, "file") | dict.fromkeys(guesses, "assumed")
    places |= weights.preprocessing_from
    places |= dict.fromkeys(settings, "user")
    weights = replace(
        weights,
        recipe=weights.recipe.replace(**changes),
        preprocessing_from={name: places.get(name, "assumed") for name in FIELDS},
    )
    return weights.add_remarks(*remarks)


def _make_printable(weights: Weights) -> Weights:
    """Return weights whose classes, remarks and arrays have names that every encoding can write."""
    stored = [replace(array, name=escape_halves(array.name)) for array in weights.stored]
    parts = [replace(part, name=escape_halves(part.name)) for part in weights.parts]
    return replace(
        weights,
        classes=make_printable_names(weights.classes),
        remarks=tuple(map(escape_halves, weights.remarks)),
        stored=tuple(stored),
        parts=tuple(parts),
    )


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
        f" {len(counts)} tensors; the first is {affected[0]}, with {counts[affected[0]]:,}: results"
        " may not be finite",
    )


def _compute_as(weights: Weights, model: str | ModelSpec) -> Weights:
    """Return weights as the chosen network. Lockstep's own are computed as any network with the
    same tensors. Raises `CheckpointError` if the weights are those of another network."""
    recipe = weights.recipe
    spec = model_spec(model)
    if recipe.spec == spec:
        return weights
    held = recipe.model if isinstance(recipe.model, str) else "a network without a name"
    wanted = model if isinstance(model, str) else DESCRIBED
    if weights.origin != LOCKSTEP:
        values = [(name, v, getattr(spec, name)) for name, v in asdict(recipe.spec).items()]
        differences = [f"{name} is {v}, not {other}" for name, v, other in values if v != other]
        raise CheckpointError(
            f"{weights.source} says that its network is {held}, not {wanted}:"
            f" {'; '.join(differences)}. Leave out --model, or name a file with that network"
        )
    own = map_shapes(recipe.spec.list_tensors(recipe.logits))
    if own != map_shapes(spec.list_tensors(recipe.logits)):
        raise CheckpointError(
            f"{weights.source} holds {held}, whose tensors are not those of {wanted}"
        )
    return replace(weights, recipe=recipe.replace(model=model)).add_remarks(
        f"computing as {wanted}, as requested; without --model it is {held}"
    )
