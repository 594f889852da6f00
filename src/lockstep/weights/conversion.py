"""Convert weights between all formats that can be read and written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, nearest
from lockstep.weights import checkpoint
from lockstep.weights.class_names import Classes, given_classes
from lockstep.weights.formats import nvidia_mxnet, nvidia_paddle, nvidia_tensorflow
from lockstep.weights.opening import Weights, locate, open_original, open_weights

Written = tuple[tuple[Path, ...], tuple[str, ...]]
"""Files and remarks."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "safetensors",
    which: str = "newest",
    ema: bool = False,
    classes: Classes | None = None,
) -> dict[str, Any]:
    """Write weights in another format; return what was written, with remarks.

    `source` is whatever `evaluate` accepts: a run, a checkpoint, a safetensors file, or a checkpoint of TensorFlow, Paddle
    or MXNet. `to` is one of:

    - "safetensors": a single file `target` with torchvision's names.
    - "nvidia-tensorflow", "nvidia-paddle", "nvidia-mxnet": a checkpoint with the prefix `target` for NVIDIA's code. For
      MXNet, `target` can also be `<prefix>-0090.params`. Velocities are written if the source has them, for TensorFlow
      also the step.

    `classes` replaces the names of the classes: names, class 0 first, or a file that lists them. Only safetensors files hold
    names.

    Nothing is overwritten. A remark names whatever cannot be carried over. Raises `CheckpointError`, and `DataError` if
    `classes` does not fit the weights.

    >>> import lockstep
    >>> result = lockstep.convert("run", "weights.safetensors")
    >>> result["written"], result["logits"], result["step"]
    (['weights.safetensors'], 10, 7)
    """
    source, target = Path(source), Path(target)
    if to not in _WRITERS:
        raise CheckpointError(f"there is no format {to!r} to convert to. {nearest(to, _WRITERS)}")
    if classes is not None and to != "safetensors":
        raise CheckpointError(f"{to} holds no names of classes; leave them out, or convert to safetensors")
    weights, state = _opened(locate(source, which), ema)
    if classes is not None:
        weights = replace(weights, classes=given_classes(classes, weights.recipe.logits, weights.classes))
    files, remarks = _WRITERS[to](target, weights, state)
    return {
        "source": str(weights.source),
        "written": [str(path) for path in files],
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "step": state.step,
        "remarks": [*weights.remarks, *remarks],
    }


def _opened(path: Path, ema: bool) -> tuple[Weights, State]:
    """Return weights and their state. If the source has only weights, the state has no momentum and step 0."""
    original = open_original(path, momentum=True, ema=ema)
    if original is not None:
        return original
    weights = open_weights(path, ema=ema)
    if not path.is_dir():
        return weights, State(0, weights.tensors, {})
    state, _ = checkpoint.load(path)
    return weights, State(state.step, weights.tensors, {}) if ema else state


def _to_safetensors(target: Path, weights: Weights, state: State) -> Written:
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the name of a safetensors file ends in .safetensors")
    about = {"recipe": weights.recipe.fields(), "classes": list(weights.classes)}
    checkpoint.write_weights(target, weights.tensors, about)
    lost = [name for name, there in (("velocities", state.momentum), ("moving averages", state.ema)) if there]
    lost += [f"step {state.step}"] if state.step else []
    return (target,), (f"left out, since the file holds only weights: {', '.join(lost)}",) if lost else ()


def _to_original(write: Callable[[Path, Recipe, State], Written]) -> Callable[[Path, Weights, State], Written]:
    """Return a function that writes a checkpoint for NVIDIA's code."""

    def written(target: Path, weights: Weights, state: State) -> Written:
        files, remarks = write(target, weights.recipe, state)
        averages = ("the moving averages were left out; --ema converts them instead of the weights",) if state.ema else ()
        return files, (*remarks, *averages)

    return written


_WRITERS: dict[str, Callable[[Path, Weights, State], Written]] = {
    "safetensors": _to_safetensors,
    "nvidia-tensorflow": _to_original(nvidia_tensorflow.write),
    "nvidia-paddle": _to_original(nvidia_paddle.write),
    "nvidia-mxnet": _to_original(nvidia_mxnet.write),
}
