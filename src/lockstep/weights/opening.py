"""Find and open trained weights of any origin: a run, a checkpoint, or a file of another program."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from lockstep.models.architectures import MODELS, model_spec, tensors
from lockstep.models.quantisation import Scales, check_scales
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe, load_recipe
from lockstep.system.errors import CheckpointError, RecipeError, nearest
from lockstep.system.event_log import LogEvent, read_log
from lockstep.system.regular_files import WEIGHTS, check_regular
from lockstep.system.strict_json import is_list_of, is_number, is_text
from lockstep.weights import checkpoint
from lockstep.weights.class_names import Classes, given_classes
from lockstep.weights.formats import (
    dtype_name,
    foreign_safetensors,
    keras_file,
    keras_variables,
    mxnet_params,
    numbers,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    onnx_graph,
    onnx_weights,
    paddle_pickle,
    tensor_bundle,
    tensorflow_weights,
    timm_folder,
    torch_file,
    torch_models,
)
from lockstep.weights.formats.common import Original, Stored, describe_arrays, list_arrays
from lockstep.weights.formats.stand_ins import refuse_packed, refuse_stand_in
from lockstep.weights.given_preprocessing import (
    Preprocessing,
    certified_preprocessing,
    checked_preprocessing,
    prepared_as,
)
from lockstep.weights.preprocessing import Changes, assumed_preprocessing

LOCKSTEP = "Lockstep"


@dataclass(frozen=True)
class Opened:
    """Weights in canonical form, and what is needed to use them."""

    recipe: Recipe
    state: State
    """The weights. Momentum and step are those of the source if they were asked for and it has
    them."""
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    source: Path
    origin: str
    """The program that wrote the weights."""
    remarks: tuple[str, ...] = ()
    """Remarks on weights that another program wrote."""
    epochs: int | None = None
    """Number of whole epochs done, if another program's file or the run's log says it."""
    is_folded: bool = False
    """Whether batch norms are folded into convolutions, so that the weights are for inference only.
    """
    stored: tuple[Stored, ...] = ()
    """The arrays of the file as it has them, also those that are not used; without optimizer and
    moving average."""
    others: tuple[Path, ...] = ()
    """Files that were read in addition to `source`, such as timm's `config.json`."""
    scales: Scales = field(default_factory=dict)
    """Scales of the inputs of all quantised layers; empty if the recipe is not quantised."""

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Parameters and batch norm statistics."""
        return self.state.tensors

    def in_precision(self, precision: str | None) -> Self:
        """Return the weights with a recipe of this precision; None keeps the recipe's precision."""
        return (
            self
            if precision is None
            else replace(self, recipe=self.recipe.replace(precision=precision))
        )

    def with_classes(self, given: Classes | None) -> Self:
        """Return the weights with given names of classes; None keeps their own. Raises `DataError`
        if they do not fit."""
        return (
            self
            if given is None
            else replace(self, classes=given_classes(given, self.recipe.logits, self.classes))
        )


class _Read(Protocol):
    def __call__(self, path: Path, /, *, momentum: bool) -> Original: ...


@dataclass(frozen=True)
class Format:
    """A format of other programs."""

    name: str
    find: Callable[[Path], Path | None]
    """Returns the file or prefix to read if a path names weights in this format; None otherwise."""
    read: _Read
    holds: Callable[[Path], bool] | None = None
    """Returns whether a file is in this format by its content alone, if `find` also goes by its
    name."""

    def is_content_of(self, file: Path) -> bool:
        """Return whether a file's content is in this format, whatever its name is."""
        return self.find(file) is not None if self.holds is None else self.holds(file)


BY_CONTENT = (
    Format("timm", timm_folder.find, timm_folder.read),
    Format("PyTorch", torch_models.find, torch_models.read, torch_file.is_torch_file),
    Format(
        "safetensors",
        foreign_safetensors.find,
        foreign_safetensors.read,
        foreign_safetensors.is_safetensors,
    ),
    Format("Keras", keras_file.find, keras_file.read, keras_variables.is_keras),
    Format("ONNX", onnx_weights.find, onnx_weights.read, onnx_graph.is_onnx),
    Format(
        "TensorFlow's graphs",
        tensorflow_weights.find,
        tensorflow_weights.read,
        tensorflow_weights.is_graph,
    ),
    Format("MXNet", nvidia_mxnet.find, nvidia_mxnet.read, mxnet_params.is_mxnet),
    Format("Paddle", nvidia_paddle.find, nvidia_paddle.read, paddle_pickle.is_paddle),
)
"""Formats whose files are recognised by what they hold, whatever their names are."""
BY_NAME = (Format("TensorFlow", tensor_bundle.find, nvidia_tensorflow.read),)
"""Formats of several files, which find each other by their names."""
_ENDINGS = (".bin", ".h5", ".keras", ".onnx", ".pb", ".pt", ".pth", ".pth.tar", ".safetensors")
"""How the names of files end that may hold weights, but do not make their folder one of weights."""
_UNDESCRIBED = ("PyTorch", "safetensors", "Paddle", "MXNet", "Keras", "ONNX", "TensorFlow's graphs")
"""Formats whose files do not say all of the preprocessing, and which programs without a published
recipe write."""
_SAYING = ("timm",)
"""Formats whose files say all of the preprocessing."""


def open_weights(
    path: str | Path,
    *,
    which: str = "newest",
    ema: bool = False,
    momentum: bool = False,
    model: str | None = None,
    needs_classifier: bool = True,
    preprocessing: Preprocessing | None = None,
) -> Opened:
    """Return the weights of a run ("newest" or "best" checkpoint, or a step's number), a checkpoint
    folder or a file.

    - With `ema`, the weights are the moving average instead of the trained weights.
    - With `momentum`, the state also has the velocities, the moving average and the loss scale, as
      far as the source has them.
    - `model` names the model of a file that fits several, such as resnet50 and resnet50-v1.
    - Weights without a classifier are refused, unless `needs_classifier` is false. Then `fc.weight`
      and `fc.bias` are missing.
    - `preprocessing` has fields of the recipe that say how images are prepared
      (`given_preprocessing.SETTABLE`), or is a recipe whose evaluation is used. It takes precedence
      over what the file says.

    The format of another program's file is recognised by its content (docs/weights.md). Its recipe
    is the published one of the model, in fp32. Raises `CheckpointError`, and `RecipeError` if
    `preprocessing` does not fit.
    """
    given = checked_preprocessing(preprocessing)
    try:
        path = Path(path)
        if which != "newest" and path.exists() and not (path / "checkpoints").is_dir():
            raise CheckpointError(
                f"{path} is no run, so it has no checkpoint {which!r} to choose; name the file"
                " itself"
            )
        path = locate(path, which)
        with np.errstate(
            over="ignore"
        ):  # float64 values beyond float32 become infinite, as --inspect shows
            found = _of_lockstep(path, ema=ema, momentum=momentum)
            found = found or _of_original(path, ema=ema, momentum=momentum, given=given.keys())
    except OSError as error:
        raise CheckpointError(f"{path!s:.200} cannot be read: {error.strerror or error}") from None
    if needs_classifier and "fc.bias" not in found.tensors:
        raise CheckpointError(
            f"{found.source} has no classifier, so it cannot classify images; train one: lockstep"
            f" train --weights {path}"
        )
    recipe, remarks = prepared_as(found.recipe, given)
    found = _saying_what_is_not_finite(
        replace(found, recipe=recipe, remarks=(*found.remarks, *remarks))
    )
    return found if model is None else _as_model(found, model)


def _saying_what_is_not_finite(found: Opened) -> Opened:
    """Add a remark that names the first tensor with NaN or infinite values, if there are any."""
    counts = {
        name: value.size - int(np.isfinite(value).sum()) for name, value in found.tensors.items()
    }
    odd = [name for name, count in counts.items() if count]
    if not odd:
        return found
    total = sum(value.size for value in found.tensors.values())
    remark = (
        f"{sum(counts.values()):,} of {total:,} values are NaN or infinite, in {len(odd)} of"
        f" {len(counts)} tensors; the first is {odd[0]}, with {counts[odd[0]]:,}: what is computed"
        " with them may not be finite"
    )
    return replace(found, remarks=(*found.remarks, remark))


def locate(path: Path, which: str) -> Path:
    """Return the path of a run's checkpoint; return any other path unchanged. Raises
    `CheckpointError`."""
    return _of_run(path, which) if (path / "checkpoints").is_dir() else path


def _of_run(run: Path, which: str) -> Path:
    folder = run / "checkpoints"
    found = checkpoint.steps(folder)
    if not found:
        raise CheckpointError(f"{run} has no checkpoint yet")
    if which == "newest":
        return checkpoint.checkpoint_path(folder, found[-1])
    if which == "best":
        step = best_step(read_log(run / "log.jsonl"))
        if step is None:
            raise CheckpointError(f"{run} was never evaluated, so it has no best checkpoint")
        return checkpoint.checkpoint_path(folder, step)
    if not which.isdigit() or int(which) not in found:
        raise CheckpointError(
            f"{run} has no checkpoint {which!r}; it has newest, best and steps {found}"
        )
    return checkpoint.checkpoint_path(folder, int(which))


def best_step(log: Iterable[LogEvent]) -> int | None:
    """Return the step with the highest top-1 in a log, the earliest if several are equal; None
    without an evaluation."""
    scores = [
        (event["top1_percent"], -event["step"])
        for event in log
        if event["kind"] == "evaluate" and event["weights"] == "trained" and "top1_percent" in event
    ]
    return -int(max(scores)[1]) if scores else None


def _of_lockstep(path: Path, *, ema: bool, momentum: bool) -> Opened | None:
    """Return the weights of a checkpoint folder or a safetensors file of Lockstep; None for
    anything else."""
    if path.is_dir() and ((path / "state.json").exists() or path.name.startswith("step-")):
        state, about = checkpoint.load_weights(path, ema=ema, everything=momentum and not ema)
        found = _noted(about, state, path)
        recipe = found.recipe.named(_name_in_run(path))
        return replace(found, recipe=recipe, epochs=_epochs_done(path, state.step))
    if path.is_file() and foreign_safetensors.is_safetensors(path):
        noted = checkpoint.metadata(path)
        if noted is not None:
            if ema:
                raise CheckpointError(
                    f"{path} is a single file; the moving average is a separate file,"
                    " ema.safetensors"
                )
            tensors, _ = checkpoint.read_weights(path, as_stored=True)
            return _noted(noted, State(0, tensors, {}), path)
    return None


def _name_in_run(folder: Path) -> str:
    """Return `based_on` of the recipe of a checkpoint's run; "" if it is unknown."""
    run = folder.parent.parent
    try:
        return load_recipe(run).based_on if (run / "recipe.yaml").is_file() else ""
    except RecipeError:  # the weights are intact, and only this name is missing
        return ""


def _epochs_done(folder: Path, step: int) -> int | None:
    """Return the number of whole epochs of a step, by the log of the checkpoint's run; None if
    there is no such log."""
    log = folder.parent.parent / "log.jsonl"
    try:
        begun = (
            [event for event in read_log(log) if event["kind"] == "start"] if log.is_file() else []
        )
    except CheckpointError:  # the weights are intact, and only this number is missing
        return None
    per_epoch = begun[-1].get("steps_per_epoch") if begun else None
    return step // per_epoch if isinstance(per_epoch, int) and per_epoch > 0 else None


def _noted(about: dict[str, Any], state: State, path: Path) -> Opened:
    try:
        recipe = Recipe.of(about["recipe"])
        classes = about["classes"]
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
    stored = list_arrays(
        describe_arrays(state.tensors), zip(state.tensors, state.tensors, strict=True)
    )
    state = replace(
        state, tensors={name: _float32(path, name, value) for name, value in state.tensors.items()}
    )
    _check_canonical(path, recipe, state)
    scales = noted_scales(about, recipe, path)
    return Opened(recipe, state, _printable(classes), path, LOCKSTEP, stored=stored, scales=scales)


def noted_scales(about: dict[str, Any], recipe: Recipe, path: Path) -> Scales:
    """Return the scales in a file's metadata; empty if the recipe is not quantised.

    Raises `CheckpointError` if they are missing or do not fit the recipe's model.
    """
    if recipe.quantisation == "none":
        return {}
    scales = about.get("scales")
    if not isinstance(scales, dict) or not all(is_number(value) for value in scales.values()):
        raise CheckpointError(
            f"{path} has no scales, which its recipe's quantisation needs; convert its run again"
        )
    try:
        check_scales(model_spec(recipe.model), scales)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {name: float(value) for name, value in scales.items()}


def _float32(path: Path, name: str, value: np.ndarray) -> np.ndarray:
    found = numbers(value)
    if found.dtype.kind != "f":
        raise CheckpointError(
            f"{path}, weights: {name} is {dtype_name(value.dtype)}, expected float32; write them"
            " again"
        )
    return found.astype(np.float32, copy=False)


def _check_canonical(path: Path, recipe: Recipe, state: State) -> None:
    """Raise `CheckpointError` unless all parts of a state have the model's tensors in float32."""
    expected = list(tensors(model_spec(recipe.model), recipe.logits))
    trained = [tensor for tensor in expected if tensor.is_trained]
    parts = {"weights": state.tensors, "velocities": state.momentum, "averages": state.ema}
    for part, values in parts.items():
        fitting = trained if part == "velocities" else expected
        if values or part == "weights":
            check_fit({tensor.name: tensor.shape for tensor in fitting}, values, f"{path}, {part}")
        for name, value in values.items():
            if value.dtype != np.float32:
                raise CheckpointError(
                    f"{path}, {part}: {name} is {value.dtype}, expected float32; write them again"
                )


def _of_original(path: Path, *, ema: bool, momentum: bool, given: Collection[str]) -> Opened:
    format, place = _recognised(path)
    found = format.read(place, momentum=momentum or ema)
    state = found.state
    if ema:
        if not state.ema:
            raise CheckpointError(f"{place} has no moving average; leave out --ema")
        state = State(state.step, state.ema, {})
    changes, about = _not_in_file(format, found, place, given)
    recipe = found.recipe.replace(**changes) if changes else found.recipe
    remarks = _printable((*found.remarks, *about))
    classes = _printable(found.classes)
    names = _printable(each.name for each in found.stored)
    stored = tuple(replace(each, name=name) for each, name in zip(found.stored, names, strict=True))
    is_folded = found.is_folded
    others = found.others
    return Opened(
        recipe,
        state,
        classes,
        place,
        found.origin,
        remarks,
        found.epochs,
        is_folded,
        stored,
        others,
    )


def _not_in_file(
    format: Format, found: Original, place: Path, given: Collection[str]
) -> tuple[Changes, tuple[str, ...]]:
    """Return the preprocessing that the file itself does not say, from its certificate or as an
    assumption, and remarks.

    The fields `given` are set by the user.
    """
    if found.says_preprocessing or format.name in _SAYING:
        return {}, ()
    changes, remarks = certified_preprocessing(place)
    if changes or format.name not in _UNDESCRIBED:
        return changes, remarks
    changes, assumed = assumed_preprocessing(
        found.origin, None if found.is_of_training else place, given
    )
    return changes, (*remarks, *assumed)


def _printable(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts of a file, in which half a UTF-16 character, which no encoding can write, is
    spelled out."""
    return tuple(text.encode(errors="backslashreplace").decode() for text in texts)


def _recognised(path: Path) -> tuple[Format, Path]:
    """Return the format of another program's weights and the file or prefix to read.

    Raises `CheckpointError` if a path names nothing that can be read, or several things.
    """
    if path.exists() and not path.is_dir():
        check_regular(path, WEIGHTS)
    if path.is_file() and path.stat().st_size == 0:
        raise CheckpointError(
            f"{path} is empty: it was not written or copied to its end; copy it again"
        )
    if path.is_file():
        refuse_stand_in(path)
        refuse_packed(path)
    format = _of_file(path) if path.is_file() else None
    if format is not None:
        return format, format.find(path) or path
    places = {
        format: place
        for format in (*BY_CONTENT, *BY_NAME)
        if (place := format.find(path)) is not None
    }
    if (
        BY_CONTENT[0] in places
    ):  # a hub's folder may hold the same weights twice, of which timm takes one
        twins = timm_folder.FILES
        places = {
            each: place
            for each, place in places.items()
            if each is BY_CONTENT[0] or place.name not in twins
        }
    found = {place: each for each, place in reversed(places.items())}
    if len(found) == 1:
        [(place, each)] = found.items()
        return each, place
    if found:
        several = ", ".join(f"{place} ({each.name})" for place, each in reversed(found.items()))
        raise CheckpointError(
            f"{path} holds weights in several formats: {several}; name one of these"
        )
    if not path.exists():
        raise CheckpointError(f"there is no run, no file and no checkpoint {path}")
    inside = [
        file for file in sorted(path.glob("*")) if file.name.endswith(_ENDINGS) and file.is_file()
    ]
    for file in inside:
        refuse_stand_in(file)
    if inside:
        raise CheckpointError(
            f"{path} is not a folder of a known format; name a file in it, such as {inside[0]}"
        )
    names = ", ".join(each.name for each in (*BY_CONTENT, *BY_NAME))
    raise CheckpointError(
        f"{path} holds no weights that can be read; expected a run's folder, a checkpoint, or"
        f" weights of {names}"
    )


def _of_file(path: Path) -> Format | None:
    """Return the format of a file: by its content, else by its name, so that the format's reader
    says what is wrong."""
    by_content = next((format for format in BY_CONTENT if format.is_content_of(path)), None)
    return by_content or next(
        (format for format in BY_CONTENT if format.find(path) is not None), None
    )


def _as_model(found: Opened, model: str) -> Opened:
    """Return weights as another model with the same tensors. Raises `CheckpointError` if the
    tensors are not its."""
    if model not in MODELS:
        raise CheckpointError(f"there is no model {model!r}. {nearest(model, MODELS)}")
    own, named = (
        {tensor.name: tensor.shape for tensor in tensors(spec, found.recipe.logits)}
        for spec in (model_spec(found.recipe.model), MODELS[model])
    )
    if own != named:
        stored = found.recipe.fields()["model"]
        raise CheckpointError(
            f"{found.source} holds {stored}, whose tensors are not those of {model}"
        )
    stored = found.recipe.model
    if stored == model:
        return found
    about = (
        f"computes as {model}, as asked; without --as it is"
        f" {stored if isinstance(stored, str) else 'another model'}"
    )
    return replace(found, recipe=found.recipe.replace(model=model), remarks=(*found.remarks, about))
