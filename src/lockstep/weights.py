"""Finding trained weights: a run's folder, one of its checkpoints, or a safetensors file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep import checkpoint
from lockstep.errors import CheckpointError, RecipeError
from lockstep.models import recognise
from lockstep.recipes import Recipe
from lockstep.run import read_log


@dataclass(frozen=True)
class Weights:
    """Tensors in canonical form, and what is needed to use them."""

    recipe: Recipe
    tensors: dict[str, np.ndarray]
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    source: Path

    def in_precision(self, precision: str | None) -> Self:
        """Return the weights to be used in another precision; None: in the recipe's."""
        return self if precision is None else replace(self, recipe=self.recipe.replace(precision=precision))


def open_weights(path: str | Path, *, which: str = "newest", ema: bool = False) -> Weights:
    """Return the weights of a run ("newest" or "best" checkpoint, or a step's number), a checkpoint folder or a file.

    With `ema`, the moving average instead of the trained weights. A safetensors file of another program with torchvision's
    names is recognised by its tensors and used with the default preprocessing, in fp32. Raises `CheckpointError`.
    """
    path = Path(path)
    if (path / "checkpoints").is_dir():
        path = _of_run(path, which)
    if not path.is_dir():
        if ema:
            raise CheckpointError(f"{path} is one file; a moving average is a file of its own, ema.safetensors")
        return _of_file(path)
    tensors, about = checkpoint.load_weights(path, ema=ema)
    return _noted(about, tensors, path)


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
            raise CheckpointError(f"{run} was never evaluated, so no checkpoint is the best")
        return checkpoint.checkpoint_path(folder, step)
    if not which.isdigit() or int(which) not in found:
        raise CheckpointError(f"{run} has no checkpoint {which!r}; it has newest, best and steps {found}")
    return checkpoint.checkpoint_path(folder, int(which))


def best_step(entries: list[dict[str, Any]]) -> int | None:
    """Return the step with the highest top-1 in a log (the earliest of equals); None without an evaluation."""
    scores = [
        (entry["top1_percent"], -entry["step"])
        for entry in entries
        if entry["kind"] == "evaluate" and entry["weights"] == "trained"
    ]
    return -int(max(scores)[1]) if scores else None


def _of_file(path: Path) -> Weights:
    if not path.is_file():
        raise CheckpointError(f"there is no run and no file {path}")
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: expected a run's folder or a .safetensors file")
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
        recipe = Recipe.of(about["recipe"])
    except RecipeError as error:
        raise CheckpointError(f"{path} was written with a recipe that this version cannot read: {error}") from None
    return Weights(recipe, tensors, tuple(about["classes"]), path)
