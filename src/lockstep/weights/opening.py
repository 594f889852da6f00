"""Find and open trained weights: of a run, a checkpoint, a safetensors file, or a TensorFlow, Paddle or MXNet checkpoint."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from lockstep.models.architectures import recognise
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.event_log import LogEvent, read_log
from lockstep.system.strict_json import is_list_of, is_text
from lockstep.weights import checkpoint
from lockstep.weights.formats import nvidia_mxnet, nvidia_paddle, nvidia_tensorflow, tensor_bundle
from lockstep.weights.formats.common import Original


@dataclass(frozen=True)
class Weights:
    """Tensors in canonical form, and what is needed to use them."""

    recipe: Recipe
    tensors: dict[str, np.ndarray]
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    source: Path
    remarks: tuple[str, ...] = ()
    """Remarks on weights that another program wrote."""

    def in_precision(self, precision: str | None) -> Self:
        """Return the weights with a recipe of this precision; None keeps the recipe's precision."""
        return self if precision is None else replace(self, recipe=self.recipe.replace(precision=precision))


def open_weights(path: str | Path, *, which: str = "newest", ema: bool = False) -> Weights:
    """Return the weights of a run ("newest" or "best" checkpoint, or a step's number), a checkpoint folder or a file.

    With `ema`, they are the moving average instead of the trained weights. A safetensors file of another program with
    torchvision's names is recognised by its tensors and gets the default preprocessing, in fp32. A checkpoint of NVIDIA's
    TensorFlow, Paddle or MXNet model (its folder, prefix or a file) gets the published recipe, in fp32. Raises
    `CheckpointError`.
    """
    path = locate(Path(path), which)
    original = open_original(path, momentum=False, ema=ema)
    if original is not None:
        return original[0]
    if not path.is_dir():
        if ema:
            raise CheckpointError(f"{path} is a single file; the moving average is a separate file, ema.safetensors")
        return _of_file(path)
    tensors, about = checkpoint.load_weights(path, ema=ema)
    return _noted(about, tensors, path)


def locate(path: Path, which: str) -> Path:
    """Return the path of a run's checkpoint; return any other path unchanged. Raises `CheckpointError`."""
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
        raise CheckpointError(f"{run} has no checkpoint {which!r}; it has newest, best and steps {found}")
    return checkpoint.checkpoint_path(folder, int(which))


def best_step(log: Iterable[LogEvent]) -> int | None:
    """Return the step with the highest top-1 in a log, the earliest if several are equal; None without an evaluation."""
    scores = [
        (event["top1_percent"], -event["step"])
        for event in log
        if event["kind"] == "evaluate" and event["weights"] == "trained" and "top1_percent" in event
    ]
    return -int(max(scores)[1]) if scores else None


def open_original(path: Path, *, momentum: bool, ema: bool) -> tuple[Weights, State] | None:
    """Return the contents of an NVIDIA checkpoint; None if the path names none. Raises `CheckpointError`."""
    for framework, (find, read) in _ORIGINALS.items():
        prefix = find(path)
        if prefix is None:
            continue
        if ema:
            raise CheckpointError(f"{prefix} is a checkpoint of {framework}; moving averages cannot be read from it")
        found = read(prefix, momentum=momentum)
        return Weights(found.recipe, found.state.tensors, (), prefix, found.remarks), found.state
    return None


class _Read(Protocol):
    def __call__(self, path: Path, /, *, momentum: bool) -> Original: ...


_ORIGINALS: dict[str, tuple[Callable[[Path], Path | None], _Read]] = {
    "TensorFlow": (tensor_bundle.find, nvidia_tensorflow.read),
    "Paddle": (nvidia_paddle.find, nvidia_paddle.read),
    "MXNet": (nvidia_mxnet.find, nvidia_mxnet.read),
}


def _of_file(path: Path) -> Weights:
    if not path.is_file():
        raise CheckpointError(f"there is no run, no file and no TensorFlow, Paddle or MXNet checkpoint {path}")
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: expected a run's folder, a .safetensors file, or a TensorFlow, Paddle or MXNet checkpoint"
        )
    tensors, about = checkpoint.read_weights(path)
    if about is not None:
        return _noted(about, tensors, path)
    tensors = {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}
    try:
        model, logits = recognise({name: value.shape for name, value in tensors.items()})
    except RecipeError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Weights(Recipe(model=model, logits=logits, precision="fp32"), tensors, (), path)


def _noted(about: dict[str, Any], tensors: dict[str, np.ndarray], path: Path) -> Weights:
    try:
        recipe, classes = Recipe.of(about["recipe"]), about["classes"]
        if not is_list_of(is_text)(classes):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: its metadata does not hold a recipe and a list of classes") from None
    except RecipeError as error:
        raise CheckpointError(f"{path} was written with a recipe that this version cannot read: {error}") from None
    return Weights(recipe, tensors, tuple(classes), path)
