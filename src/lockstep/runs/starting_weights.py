"""Runs that start from given weights instead of the recipe's initial ones, or resume where another
program stopped.

The weights are pruned if the recipe is sparse.

Before its first step such a run has, in addition to the files of `lockstep.runs.folder`:

    start.json                  name of the given weights, whether they or a linear probe have the
                                run's classes, SHA-256 of their tensors and of the masks
    masks.safetensors           which weights pruning keeps, bool by tensor, if the recipe is sparse
    checkpoints/step-00000000   the state before the first step

The checkpoint is written last: a run that has one is started, and does not read the given weights
again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialise

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe, difference
from lockstep.recipes.field_validation import format_value
from lockstep.recipes.initial_weights import initial_state, initial_tensors
from lockstep.runs.kept_classes import (
    CLASSIFIER,
    NamedClassifier,
    are_same_classes,
    describe_positions,
    name_classifier,
)
from lockstep.system.errors import CheckpointError, RecipeError, UserError
from lockstep.system.files import appearing
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.system.strict_json import parsed
from lockstep.system.text import format_count, make_printable_names
from lockstep.weights import (
    AnySource,
    Weights,
    checkpoint,
    choose,
    locate_weights,
    open_weights,
)
from lockstep.weights.recognition import check_exists
from lockstep.weights.sparsity import make_masks, prune_tensors


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
    classes: tuple[str, ...] | None = None
    """Names of the classes that the classifier of the weights tells apart, as
    `make_printable_names` has them, empty if they are unknown; None if the classifier is the
    recipe's initial one."""

    named: NamedClassifier | None = None
    """The classifier as it was given, if it names its classes and the run does not resume."""
    is_probe: bool = False
    """Whether the classifier is a linear probe of the run's images."""
    folded_norms: tuple[str, ...] = ()
    """Names of the batch norms that are folded into convolutions."""
    checkpoint_file: Path | None = None
    """The file of the checkpoint if the weights are those of a run."""
    details: tuple[str, ...] = ()
    """Details that few users need, such as where the classifier comes from."""

    @property
    def option(self) -> str:
        """The option that names the weights on the command line."""
        return "--weights" if self.resumed is None else "--resume-from"

    def knows(self, classes: Sequence[str]) -> bool:
        """Return whether the weights say that they tell these classes apart, in any order."""
        return bool(self.classes) and are_same_classes(self.classes or (), classes)


class StartSource:
    """The file or folder that a new run starts from."""

    def __init__(
        self, source: AnySource, *, resumes: bool = False, model: str | ModelSpec | None = None
    ) -> None:
        """With `resumes`, the run resumes where the program of a checkpoint stopped. `model` is the
        run's; a file can hold one that has no name only if it is known."""
        choice = choose(source, checkpoint="newest" if resumes else None)
        is_needed = choice.model is None and isinstance(model, ModelSpec)
        self._choice = choose(choice, model=model) if is_needed else choice
        self.resumes = resumes

    @cached_property
    def path(self) -> Path:
        """Where the weights are. The first use downloads those that are somewhere else."""
        return locate_weights(self._choice.source)

    def check_exists(self) -> None:
        """Raise `CheckpointError` if there is nothing at the path."""
        check_exists(self.path)

    @cached_property
    def weights(self) -> Weights:
        """The opened weights, with velocities and moving average if the run resumes from them.
        Raises `CheckpointError` if they cannot be read."""
        choice = replace(self._choice, source=self.path)
        return open_weights(choice, momentum=self.resumes, needs_classifier=False)

    def knows(self, classes: Sequence[str]) -> bool:
        """Return whether the weights say that they tell these classes apart.

        Weights that do not name their classes may have other ones: a linear probe can replace the
        classifier.
        """
        weights = self.weights
        fits = weights.has_classifier and weights.recipe.logits == len(classes)
        return fits and are_same_classes(weights.classes, make_printable_names(classes))


def find_start(
    weights: AnySource | None, resume_from: AnySource | None, model: str | ModelSpec
) -> StartSource | None:
    """Return what a run with this model starts or resumes from; None if it is neither. Raises
    `UserError` if it is both."""
    if weights is not None and resume_from is not None:
        raise UserError(
            "--weights and --resume-from exclude each other: start a run, or resume one"
        )
    start = weights or resume_from
    return StartSource(start, resumes=weights is None, model=model) if start else None


_INITIAL = "the classifier starts from the recipe's initial values"
INVISIBLE_FIELDS = ("model", "padding", "bn_epsilon", "mean", "std", "interpolation")
"""Fields that can differ although the tensors have the same shapes: of the network (v1 and v1.5),
and of preprocessing."""


def fit_start(source: StartSource | None, recipe: Recipe, run: Path) -> Start | None:
    """Return the weights of a source in the shapes of the recipe's model; None without a source.

    If the weights have another number of logits, the classifier is the recipe's initial one, until
    the classes of the run are known; a run cannot resume with such a classifier. Raises
    `CheckpointError` if the weights cannot be read or do not fit, `RecipeError` if there are none
    and the run in folder `run` cannot start without them.
    """
    _check_need(source, recipe, run)
    if source is None:
        return None
    weights = source.weights
    if weights.folded_norms and source.resumes:
        raise CheckpointError(
            f"{weights.source} has batch norms that are folded into convolutions, so training"
            " cannot resume from it: start from its weights with --weights"
        )
    verb = "resumes from" if source.resumes else "starts from the weights of"
    name = weights.source.name
    notes = [*weights.remarks]
    detail = f"{verb} {name}"
    if weights.source.parent.name == "checkpoints":
        name = weights.source.parent.parent.name
        notes = [f"{name}: {remark}" for remark in weights.remarks]
        detail += f" of {name}"
    changed = difference(weights.recipe, recipe)
    for name in INVISIBLE_FIELDS:
        if name in changed:
            before, after = map(format_value, changed[name])
            notes.append(f"the weights have {name}={before}, this run {name}={after}")
    tensors = _convert_to_float32(weights.tensors)
    features = recipe.spec.features
    named = None if source.resumes else name_classifier(weights.classes, tensors, features)
    fitted = _fit_classifier(source, tensors, recipe, notes, is_named=named is not None)
    _check_shapes(weights, fitted, recipe)
    hashed = dict(tensors)
    if source.resumes:
        hashed |= {f"velocity {name}": value for name, value in weights.state.momentum.items()}
        hashed |= {f"average {name}": value for name, value in weights.state.ema.items()}
        second_moments = weights.state.second_moments
        hashed |= {f"second moment {name}": value for name, value in second_moments.items()}
    return Start(
        weights.source.name,
        hash_tensors(hashed),
        fitted,
        tuple(notes),
        details=(detail,),
        classes=weights.classes if fitted is tensors else None,
        named=named,
        resumed=weights if source.resumes else None,
        folded_norms=weights.folded_norms,
        checkpoint_file=weights.checkpoint_file,
    )


def _check_need(source: StartSource | None, recipe: Recipe, run: Path) -> None:
    """Raise `RecipeError` if the recipe needs trained weights before the first step, and the source
    is none or a checkpoint to resume from."""
    is_random = source is None and not checkpoint.steps(run / "checkpoints")
    if recipe.frozen and is_random:
        raise RecipeError(
            f"frozen ({', '.join(recipe.frozen)}) keeps trained weights, but none are given: pass"
            " them as --weights, or use --set frozen=[]"
        )
    if recipe.linear_probe and is_random:
        raise RecipeError(
            "linear_probe fits a classifier on trained weights, but none are given: pass them as"
            " --weights, or use --set linear_probe=false"
        )
    for field, verb in (("sparsity", "prunes"), ("quantisation", "calibrates")):
        value = getattr(recipe, field)
        if value == "none":
            continue
        if is_random:
            raise RecipeError(
                f"{field} {value} {verb} trained weights, but none are given: train with"
                f" {field}=none first, then pass that run as --weights"
            )
        if source is not None and source.resumes:
            raise RecipeError(
                f"{field} {value} {verb} trained weights before the first step, so a run with it"
                " cannot resume from a checkpoint: give it as --weights"
            )


def _fit_classifier(
    source: StartSource,
    tensors: dict[str, np.ndarray],
    recipe: Recipe,
    notes: list[str],
    *,
    is_named: bool,
) -> dict[str, np.ndarray]:
    """Return the tensors, with the recipe's initial classifier if theirs has another number of
    logits or is missing. Then add a note, or raise `CheckpointError` if the run resumes."""
    outputs = tensors["fc.bias"].size if "fc.bias" in tensors else 0
    if outputs == recipe.logits:
        return tensors
    if source.resumes:
        raise CheckpointError(
            f"{source.weights.source} has {format_count(outputs, 'logit')}, but the recipe has"
            f" {recipe.logits}, so training cannot resume from it: --set logits={outputs}, or start"
            " from its weights with --weights"
        )
    if not (recipe.linear_probe or is_named):
        problem = f"{format_count(outputs, 'logit')}, not {recipe.logits}"
        notes.append(f"the weights have {problem if outputs else 'no classifier'}: {_INITIAL}")
    return tensors | _draw_classifier(recipe)


def _draw_classifier(recipe: Recipe) -> dict[str, np.ndarray]:
    initial = initial_tensors(recipe)
    return {name: initial[name] for name in CLASSIFIER}


def _check_shapes(weights: Weights, fitted: dict[str, np.ndarray], recipe: Recipe) -> None:
    """Raise `CheckpointError` if tensors do not have the names and shapes of the recipe's model."""
    spec = recipe.spec
    expected = {tensor.name: tensor.shape for tensor in spec.list_tensors(recipe.logits)}
    if expected.keys() != fitted.keys() and weights.recipe.model != recipe.model:
        held = weights.recipe.fields()["model"]
        name = held if isinstance(held, str) else "a different network"
        value = held if isinstance(held, str) else f"'{json.dumps(held, allow_nan=False)}'"
        raise CheckpointError(
            f"{weights.source} holds {name}, which does not fit the recipe's model"
            f" {recipe.fields()['model']}: --set model={value}"
        )
    check_fit(expected, fitted, f"the weights {weights.source} do not fit the recipe's model")


def _convert_to_float32(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()}


def write_start(
    run: Path,
    recipe: Recipe,
    start: Start,
    classes: Sequence[str] = (),
    *,
    in_folders: bool = False,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write to a run's folder what it starts from, and its masks if the recipe is sparse.

    `classes` are those of the run's images, and `in_folders` says that their order is that of class
    folders. Returns the pruned tensors that it starts from, and
    notes for the user. Raises `CheckpointError` if the folder cannot be written to.
    """
    start = _keep_classes(start, recipe, make_printable_names(classes))
    start_values = start.tensors
    notes = [*start.notes]
    description: dict[str, Any] = {
        "weights": start.name,
        "weights_sha256": start.digest,
        "is_classifier": start.classes is not None
        and start.classes in ((), make_printable_names(classes)),
    }
    if start.is_probe:
        description["is_probe"] = True
    if start.classes == ():
        notes.append(describe_positions(classes, in_folders=in_folders))
    if start.classes and not description["is_classifier"] and start.resumed is None:
        notes.append(
            f"the weights name their classes differently ({', '.join(start.classes[:3])}), and"
            " training starts from their classifier; --set linear_probe=true fits one to your"
            " images"
        )
    try:
        if recipe.sparsity != "none":
            kept = make_masks(
                start_values, recipe.sparsity, recipe.sparsity_excluded, recipe.stem_channels
            )
            with appearing(run / "masks.safetensors") as partial:
                partial.write_bytes(serialise(kept))
            description["masks_sha256"] = hash_tensors(kept)
            start_values = start_values | prune_tensors(start_values, kept)
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


def _keep_classes(start: Start, recipe: Recipe, classes: tuple[str, ...]) -> Start:
    """Return what a run starts from with a classifier whose outputs have the order of the run's
    classes: rows of classes that the weights know by name, and the recipe's initial ones."""
    named = start.named
    if named is None or start.is_probe or classes in (start.classes, ()):
        return start
    places = named.match(classes)
    knows_all = bool((places >= 0).all())
    if not (places >= 0).any():
        return start if start.classes else replace(start, notes=(*start.notes, _INITIAL))
    note = named.describe(classes, places)
    if knows_all and len(classes) == len(named.classes):
        note = "classifier outputs are reordered by class name"
    return replace(
        start,
        tensors=start.tensors | named.fill(places, _draw_classifier(recipe)),
        notes=(*start.notes, note),
        classes=classes if knows_all else None,
    )


def build_first_state(
    recipe: Recipe, values: dict[str, np.ndarray], start: Start, per_epoch: int
) -> tuple[State, list[str]]:
    """Return the state before the first step of a run from given weights, and notes for the user.

    `values` are the weights as `write` returns them, `per_epoch` is the number of steps of an
    epoch. If the run resumes from another program's checkpoint, velocities, moving average, loss
    scale and step are its. Raises `CheckpointError` if it does not say how many steps are done, or
    if the run ends before.
    """
    initial = initial_state(recipe, values)
    if start.resumed is None:
        return initial, []
    source = start.resumed
    state = source.state
    step = state.step or (source.epochs or 0) * per_epoch
    if not step:
        raise CheckpointError(
            f"{source.source} does not say how many steps or epochs are done, so training cannot"
            " resume from it; start from its weights with --weights"
        )
    total = recipe.epochs * per_epoch
    if step > total:
        raise CheckpointError(
            f"{source.source} has done step {step}, but this run ends at step {total}:"
            f" {format_count(recipe.epochs, 'epoch')} of {format_count(per_epoch, 'step')}"
        )
    if source.recipe.optimizer != recipe.optimizer or initial.second_moments.keys() != (
        state.second_moments.keys()
    ):
        raise CheckpointError(
            f"{source.source} does not have the state of the optimizer {recipe.optimizer}, so"
            " training cannot resume from it; start from its weights with --weights, or set"
            f" optimizer={source.recipe.optimizer}"
        )
    is_scaled = recipe.loss_scaling == "dynamic"
    notes = [f"step {step} of {total} is done, epoch {step / per_epoch:g} of {recipe.epochs}"]
    if not state.momentum and not any("velocities" in remark for remark in source.remarks):
        notes.append("the checkpoint has no velocities: they start at 0")
    if recipe.ema_decay and not state.ema:
        notes.append("the checkpoint has no moving average: it starts at the weights")
    if state.ema and not recipe.ema_decay:
        notes.append("the moving average is ignored: the recipe has none")
    if is_scaled and not state.scaler:
        notes.append("the checkpoint has no loss scale: it starts at the recipe's")
    momentum = _convert_to_float32(state.momentum) or initial.momentum
    average = state.ema if recipe.ema_decay and state.ema else initial.ema
    scaler = state.scaler if is_scaled else {}
    second_moments = _convert_to_float32(state.second_moments)
    return State(step, initial.tensors, momentum, average, scaler, second_moments), notes


def refuse_other_weights(run: Path, start: Start) -> None:
    """Raise `CheckpointError` if the run to resume was not started from the given weights."""
    if not (run / "start.json").is_file():
        raise CheckpointError(
            f"{run} was started from its recipe's initial weights, not from {start.name}: leave out"
            f" {start.option}, or use another --out"
        )
    noted = read_start(run)
    if noted["weights_sha256"] != start.digest:
        raise CheckpointError(
            f"{run} was started from other weights ({noted['weights']}) than those of {start.name}:"
            f" leave out {start.option}, or use another --out"
        )


def read_masks(run: Path) -> dict[str, np.ndarray]:
    """Return the masks of a sparse run. Raises `CheckpointError` if they are missing or damaged."""
    path = run / "masks.safetensors"
    kept, _ = checkpoint.read_weights(path)
    if hash_tensors(kept) != read_start(run).get("masks_sha256"):
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 differs from the one in start.json; restore it"
        )
    return kept


def starts_as_classifier(run: Path) -> bool:
    """Return whether a run was started from weights that tell its classes apart, so that they can
    be evaluated before the first step."""
    return (run / "start.json").exists() and bool(read_start(run).get("is_classifier"))


def starts_from_probe(run: Path) -> bool:
    """Return whether the classifier that a run was started from is a linear probe."""
    return (run / "start.json").exists() and bool(read_start(run).get("is_probe"))


def read_start(run: Path) -> dict[str, Any]:
    """Return the contents of a run's `start.json`. Raises `CheckpointError`."""
    path = run / "start.json"
    try:
        noted = parsed(read_regular_text(path, TEXT))
    except (OSError, ValueError):
        noted = None
    if not isinstance(noted, dict) or "weights_sha256" not in noted:
        raise CheckpointError(
            f"{path} is missing or damaged; restore it, or start again with a new --out"
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
