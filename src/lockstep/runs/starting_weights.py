"""Runs that start from given weights instead of the recipe's initial ones, or resume where another
program stopped.

The weights are pruned if the recipe is sparse.

Before its first step such a run has, in addition to the files of `lockstep.runs.folder`:

    start.json                  name of the given weights, SHA-256 of their tensors and of the masks
    masks.safetensors           which weights pruning keeps, bool by tensor, if the recipe is sparse
    checkpoints/step-00000000   the state before the first step

The checkpoint is written last: a run that has one is started, and does not read the given weights
again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialise

from lockstep.models.architectures import model_spec, tensors
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe, difference
from lockstep.recipes.initial_weights import initial_state, initial_tensors
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import appearing
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.weights import Weights, checkpoint, open_weights
from lockstep.weights.sparsity import masks, pruned


@dataclass(frozen=True)
class Start:
    """Weights that a run is to start from."""

    name: str
    """Name of the file or checkpoint, without its folder."""
    digest: str
    """SHA-256 of the tensors as they were given, and of velocities and moving averages if the run
    resumes from them."""
    tensors: dict[str, np.ndarray]
    """All tensors of the recipe's model, float32."""
    notes: tuple[str, ...]
    """Notes for the user, such as differences from the recipe."""
    resumed: Weights | None = None
    """What another program stored in addition to the weights, if the run resumes from there."""

    @property
    def option(self) -> str:
        """The option that names the weights on the command line."""
        return "--weights" if self.resumed is None else "--resume-from"


def open_given(weights: Path, *, resumes: bool = False) -> Weights:
    """Return the weights that a run is given, with velocities and moving average if it resumes from
    them.

    Raises `CheckpointError` if they cannot be read.
    """
    return open_weights(weights, momentum=resumes, needs_classifier=False)


def fit_start(
    weights: Path | Weights | None, recipe: Recipe, run: Path, *, resumes: bool = False
) -> Start | None:
    """Return the given weights in the shapes of the recipe's model; None if none are given.

    `weights` are a path, or what `open_given` returns for it with the same `resumes`. If they have
    another number of logits, the classifier is the recipe's initial one. With `resumes`, the run
    resumes where the weights' program stopped, which such a classifier forbids. Raises
    `CheckpointError` if the weights cannot be read or do not fit, `RecipeError` if none are given
    and `run` cannot start without them.
    """
    needed = _needs_trained_weights(recipe)
    if weights is None:
        if needed is not None and not checkpoint.steps(run / "checkpoints"):
            field, does = needed
            raise RecipeError(
                f"{field} {getattr(recipe, field)} {does} trained weights, but none are given:"
                f" train with {field}=none first, then pass that run as --weights"
            )
        return None
    if resumes and needed is not None:
        field, does = needed
        raise RecipeError(
            f"{field} {getattr(recipe, field)} {does} trained weights before the first step, so a"
            " run with it cannot resume from a checkpoint: give it as --weights"
        )
    found = weights if isinstance(weights, Weights) else open_given(weights, resumes=resumes)
    if found.is_folded:
        raise CheckpointError(
            f"{found.source} has batch norms that are folded into convolutions, which serves"
            " inference only: start from the weights that it was made from"
        )
    given = {name: np.ascontiguousarray(value, np.float32) for name, value in found.tensors.items()}
    changed = difference(found.recipe, recipe)
    notes = [
        *found.remarks,
        f"{'resumes from' if resumes else 'starts from the weights of'} {found.source.name}",
    ]
    notes += [
        f"the weights have {name} {changed[name][0]}, not {changed[name][1]}"
        for name in _UNSEEN
        if name in changed
    ]
    fitted = _with_classifier(given, recipe)
    outputs = given["fc.bias"].size if "fc.bias" in given else 0
    if fitted is not given and resumes:
        raise CheckpointError(
            f"{found.source} has {outputs} logits, but the recipe has {recipe.logits}, so training"
            " cannot resume from it: set logits, or start from its weights with --weights"
        )
    if fitted is not given:
        notes.append(
            "the weights have"
            f" {f'{outputs} logits, not {recipe.logits}' if outputs else 'no classifier'}: the"
            " classifier starts from the recipe's initial values"
        )
    expected = {
        tensor.name: tensor.shape for tensor in tensors(model_spec(recipe.model), recipe.logits)
    }
    if isinstance(found.recipe.model, str) and expected.keys() != fitted.keys():
        raise CheckpointError(
            f"{found.source} holds {found.recipe.model}, which does not fit the recipe's model "
            f"{recipe.fields()['model']}: --set model={found.recipe.model}"
        )
    check_fit(expected, fitted, f"the weights {found.source} do not fit the recipe's model")
    parts = {"velocity": found.state.momentum, "average": found.state.ema} if resumes else {}
    everything = given | {
        f"{part} {name}": value for part, values in parts.items() for name, value in values.items()
    }
    return Start(
        found.source.name,
        hash_tensors(everything),
        fitted,
        tuple(notes),
        found if resumes else None,
    )


def _needs_trained_weights(recipe: Recipe) -> tuple[str, str] | None:
    """Return the field of a recipe that needs trained weights, and what it does with them; None if
    there is none."""
    verbs = {"sparsity": "prunes", "quantisation": "calibrates"}
    return next(
        ((field, verb) for field, verb in verbs.items() if getattr(recipe, field) != "none"), None
    )


_UNSEEN = ("model", "padding", "bn_epsilon", "mean", "std", "interpolation")
"""Fields that can differ although the tensors have the same shapes: of the network (v1 and v1.5),
and of preprocessing."""


def fields_of(weights: Weights) -> dict[str, Any]:
    """Return the fields of a recipe that given weights decide: the network, and mean, standard
    deviation and interpolation of its images, as plain values.
    """
    fields = weights.recipe.fields()
    return {name: fields[name] for name in _UNSEEN}


def _with_classifier(given: dict[str, np.ndarray], recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the given weights, with the recipe's initial classifier if theirs has another number
    of logits."""
    if "fc.bias" in given and given["fc.bias"].size == recipe.logits:
        return given
    initial = initial_tensors(recipe)
    return given | {name: initial[name] for name in ("fc.weight", "fc.bias")}


def write(run: Path, recipe: Recipe, start: Start) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write to a run's folder what it starts from, and its masks if the recipe is sparse.

    Returns the pruned tensors that it starts from, and notes for the user. Raises `CheckpointError`
    if the folder cannot be written to.
    """
    start_values = start.tensors
    notes = [*start.notes]
    description: dict[str, Any] = {"weights": start.name, "weights_sha256": start.digest}
    try:
        if recipe.sparsity != "none":
            kept = masks(
                start_values, recipe.sparsity, recipe.sparsity_excluded, recipe.stem_channels
            )
            with appearing(run / "masks.safetensors") as partial:
                partial.write_bytes(serialise(kept))
            description["masks_sha256"] = hash_tensors(kept)
            start_values = start_values | pruned(start_values, kept)
            zeros = sum(mask.size - np.count_nonzero(mask) for mask in kept.values())
            notes.append(
                f"{recipe.sparsity} sets {zeros:,} weights in {len(kept)} tensors to 0 and keeps"
                " them there"
            )
        with appearing(run / "start.json") as partial:
            partial.write_text(
                json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
                encoding="utf-8",
            )
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {run}: {error.strerror}; use another --out"
        ) from None
    return start_values, notes


def first_state(
    recipe: Recipe, values: dict[str, np.ndarray], start: Start, per_epoch: int
) -> tuple[State, list[str]]:
    """Return the state before the first step of a run from given weights, and notes for the user.

    `values` are the weights as `write` returns them, `per_epoch` is the number of steps of an
    epoch. If the run resumes from another program's checkpoint, velocities, moving average, loss
    scale and step are its. Raises `CheckpointError` if it does not say how many steps are done, or
    if the run ends before.
    """
    begun = initial_state(recipe, values)
    if start.resumed is None:
        return begun, []
    source = start.resumed
    found = start.resumed.state
    step = found.step or (source.epochs or 0) * per_epoch
    if not step:
        raise CheckpointError(
            f"{source.source} does not say how many steps or epochs are done, so training cannot"
            " resume from it; start from its weights with --weights"
        )
    total = recipe.epochs * per_epoch
    if step > total:
        raise CheckpointError(
            f"{source.source} has done {step} steps, but this run ends at step {total}:"
            f" {recipe.epochs} epochs of {per_epoch} steps"
        )
    is_scaled = recipe.loss_scaling == "dynamic"
    notes = [f"step {step} of {total} is done, {step / per_epoch:g} of {recipe.epochs} epochs"]
    if not found.momentum and not any("velocities" in remark for remark in source.remarks):
        notes.append("there are no velocities: they start at 0")
    notes += (
        ["there is no moving average: it starts at the weights"]
        if recipe.ema_decay and not found.ema
        else []
    )
    notes += (
        ["the moving average was left out: the recipe has none"]
        if found.ema and not recipe.ema_decay
        else []
    )
    notes += (
        ["there is no loss scale: it starts at the recipe's"]
        if is_scaled and not found.scaler
        else []
    )
    momentum = {
        name: np.ascontiguousarray(value, np.float32) for name, value in found.momentum.items()
    } or begun.momentum
    average = found.ema if recipe.ema_decay and found.ema else begun.ema
    return State(step, begun.tensors, momentum, average, found.scaler if is_scaled else {}), notes


def forget(run: Path) -> None:
    """Remove the files of a command that was killed before its run was started."""
    for name in ("start.json", "masks.safetensors"):
        for left in (
            name,
            f".{name}.partial",
            f"{name}.partial",
        ):  # the last is how older versions wrote
            (run / left).unlink(missing_ok=True)


def refuse_others(run: Path, start: Start | None) -> None:
    """Raise `CheckpointError` if weights are given and the run to resume was not started from them."""
    if start is None:
        return
    if not (run / "start.json").is_file():
        raise CheckpointError(
            f"{run} was started from its recipe's initial weights, not from {start.name}: leave out"
            f" {start.option}, or use another --out"
        )
    noted = _description(run)
    if noted["weights_sha256"] != start.digest:
        raise CheckpointError(
            f"{run} was started from other weights ({noted['weights']}) than those of {start.name}:"
            f" leave out {start.option}, or use another --out"
        )


def read_masks(run: Path) -> dict[str, np.ndarray]:
    """Return the masks of a sparse run. Raises `CheckpointError` if they are missing or damaged."""
    path = run / "masks.safetensors"
    kept, _ = checkpoint.read_weights(path)
    if hash_tensors(kept) != _description(run).get("masks_sha256"):
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 differs from the one in start.json; restore it"
        )
    return kept


def _description(run: Path) -> dict[str, Any]:
    path = run / "start.json"
    try:
        noted = json.loads(read_regular_text(path, TEXT))
    except (OSError, ValueError):
        noted = None
    if not isinstance(noted, dict) or "weights_sha256" not in noted:
        raise CheckpointError(
            f"{path} is missing or damaged; restore it, or start again in another --out"
        )
    return noted


def hash_tensors(values: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values; the order of the names does not
    matter."""
    sha = hashlib.sha256()
    for name, value in sorted(values.items()):
        sha.update(f"{name} {value.dtype} {value.shape}\n".encode())
        sha.update(np.ascontiguousarray(value).data)
    return sha.hexdigest()
