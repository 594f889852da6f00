"""What evaluations and predictions compute with: a runtime that holds the weights, in a precision
that the machine has."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends.emulation import emulation
from lockstep.data import Batch
from lockstep.inference.loaded_engine import in_usable_precision, load_engine
from lockstep.inference.runtimes import (
    AUTO,
    NATIVE,
    RUNTIMES,
    check_runtime,
    choose_device,
    explain_refusal,
    open_runtime,
)
from lockstep.inference.runtimes.choosing import fastest
from lockstep.inference.runtimes.exported import Exported, exported_file, open_exported
from lockstep.inference.runtimes.scoring import scores
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import BackendError
from lockstep.system.machine import gpu
from lockstep.system.ranks import is_leading
from lockstep.weights import Weights


@dataclass(frozen=True)
class Computing:
    """An open runtime, and what it computes with."""

    runtime: str
    """Its name."""
    weights: Weights
    """In the precision that it computes in."""
    recorder: Recorder
    evaluate: Callable[[Iterable[Batch]], Scores]
    """Returns the scores of every image that is not padding, of all ranks."""
    predict: Callable[[np.ndarray], np.ndarray]
    """Returns the logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
    world: backends.World | None = None
    """That of the backend's engine; None for other runtimes than the native one."""
    rank: int = 0
    ranks: int = 1
    on_gpu: bool = False


@contextmanager
def computing(
    runtime: str,
    weights: Weights,
    precision: str | None,
    execution: Execution,
    listener: Listener | None,
    *,
    most_images: int,
    exported: Exported | None = None,
    shares_cores: bool = False,
) -> Iterator[Computing]:
    """Yield a runtime that holds the weights, or runs an exported model. `runtime` is a name, or
    "auto".

    `precision` is the one that was asked for; None: the recipe's, or fp32 if that is not in
    hardware, with a note. `most_images` is the largest batch. `shares_cores`: other threads need
    the cores between two batches.
    """
    recorder = Recorder(listener if is_leading() else None)
    if exported is not None and runtime == AUTO:
        runtime = next(iter(list_export_runtimes()), "onnxruntime")
    elif runtime == AUTO:
        weights = in_fast_precision(weights, precision, execution, recorder)
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        runtime = fastest(weights, execution, recorder) if alone else NATIVE
    check_runtime(runtime, execution.backend)
    if runtime == NATIVE:
        with _native(weights, precision, execution, listener) as found:
            yield found
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BackendError(
            f"the runtime {runtime} computes in one process; start it without a launcher, or use"
            f" --runtime {NATIVE}"
        )
    weights = in_precision_of(runtime, weights, precision, execution, recorder)
    model = None if exported is None else exported.model
    how: dict[str, Any] = {
        "most_images": most_images,
        "exported": model,
        "shares_cores": shares_cores,
    }
    with open_runtime(runtime, weights, execution, **how) as opened:
        evaluate = partial(scores, opened)
        yield Computing(runtime, weights, recorder, evaluate, opened.predict, on_gpu=opened.on_gpu)


@contextmanager
def _native(
    weights: Weights, precision: str | None, execution: Execution, listener: Listener | None
) -> Iterator[Computing]:
    """Yield the backend's engine. All ranks of its world take part."""
    world = backends.load(execution.backend).world(execution)
    try:
        recorder = Recorder(listener if world.rank == 0 else None)
        weights = in_usable_precision(weights, precision, world, execution, recorder)
        with load_engine(weights, world, execution) as engine:
            place = world, world.rank, world.ranks, world.on_gpu
            yield Computing(NATIVE, weights, recorder, engine.evaluate, engine.predict, *place)
    finally:
        world.close()


def export_to_run(source: Path, runtime: str | None, execution: Execution) -> Exported | None:
    """Return the exported model at a path; None if it is none, or if the native runtime computes
    with its weights."""
    if runtime == NATIVE or (
        runtime is None and (execution.backend != DEFAULT_BACKEND or not list_export_runtimes())
    ):
        return None
    file = exported_file(source)
    return None if file is None else open_exported(file)


def list_export_runtimes() -> list[str]:
    """Return the installed runtimes that run ONNX models on a CPU."""
    return [
        name
        for name, row in RUNTIMES.items()
        if row.runs_onnx and "cpu" in row.precisions and not row.missing()
    ]


def in_fast_precision(
    weights: Weights, asked: str | None, execution: Execution, recorder: Recorder
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if
    that would be emulated.

    No framework is loaded for it.
    """
    precision = asked or weights.recipe.precision
    on_gpu = execution.device != "cpu" and gpu() is not None
    emulated = emulation(precision, on_gpu=on_gpu, backend=execution.backend)
    if emulated is None or asked is not None:
        return weights.replace_precision(asked)
    recorder.note(
        f"computes in fp32; {emulated}. To keep the recipe's precision: --set precision={precision}"
    )
    return weights.replace_precision("fp32")


def in_precision_of(
    runtime: str, weights: Weights, asked: str | None, execution: Execution, recorder: Recorder
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if the
    runtime lacks that.

    Raises `BackendError` if the runtime lacks the requested one.
    """
    device = choose_device(runtime, execution)
    why = explain_refusal(runtime, asked or weights.recipe.precision, device)
    if why and asked is not None:
        raise BackendError(why)
    if why:
        recorder.note(
            f"computes in fp32, not in the recipe's {weights.recipe.precision}:"
            f" {why.partition(';')[0]}"
        )
    return weights.replace_precision("fp32" if why else asked)
