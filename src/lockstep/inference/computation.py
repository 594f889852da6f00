"""What evaluations and predictions compute with: a runtime that holds the weights, in a precision
that the machine has."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lockstep import backends
from lockstep.data import Batch
from lockstep.inference.loaded_engine import choose_precision, load_engine
from lockstep.inference.runtimes import (
    AUTO,
    NATIVE,
    RUNTIMES,
    check_runtime,
    choose_device,
    explain_refusal,
    open_runtime,
)
from lockstep.inference.runtimes.choosing import choose_fastest
from lockstep.inference.runtimes.exported import ExportedModel, open_exported
from lockstep.inference.runtimes.scoring import compute_scores
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import BackendError
from lockstep.system.machine import gpu
from lockstep.system.ranks import count_ranks, is_leading
from lockstep.weights import Weights


@dataclass(frozen=True)
class Computation:
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
def open_computation(
    runtime: str,
    weights: Weights,
    precision: str | None,
    execution: Execution,
    listener: Listener | None,
    *,
    most_images: int,
    exported: ExportedModel | None = None,
    shares_cores: bool = False,
) -> Iterator[Computation]:
    """Yield a runtime that holds the weights, or runs an exported model. `runtime` is a name, or
    "auto".

    `precision` is the requested one; None: the recipe's, or fp32 if that is not in
    hardware, with a note. `most_images` is the largest batch. `shares_cores`: other threads need
    the cores between two batches.
    """
    recorder = Recorder(listener if is_leading() else None)
    ranks = count_ranks()
    if exported is not None and runtime == AUTO:
        runtime = next(iter(list_export_runtimes()), "onnxruntime")
    elif runtime == AUTO:
        if precision is not None:
            weights = weights.replace_precision(precision)
        else:
            on_gpu = execution.device != "cpu" and gpu() is not None
            weights = choose_precision(weights, None, execution, recorder, on_gpu=on_gpu)
        runtime = NATIVE if ranks > 1 else choose_fastest(weights, execution, recorder)
    check_runtime(runtime, execution.backend)
    if runtime == NATIVE:
        with _open_native(weights, precision, execution, listener) as computation:
            yield computation
        return
    if ranks > 1:
        raise BackendError(
            f"the runtime {runtime} computes in one process; start it without a launcher, or use"
            f" --runtime {NATIVE}"
        )
    weights = _choose_runtime_precision(runtime, weights, precision, execution, recorder)
    opening = open_runtime(
        runtime,
        weights,
        execution,
        most_images=most_images,
        exported=None if exported is None else exported.model,
        shares_cores=shares_cores,
    )
    with opening as opened:
        evaluate = partial(compute_scores, opened, flips=weights.recipe.eval_flips)
        yield Computation(
            runtime, weights, recorder, evaluate, opened.predict, on_gpu=opened.on_gpu
        )


@contextmanager
def _open_native(
    weights: Weights, precision: str | None, execution: Execution, listener: Listener | None
) -> Iterator[Computation]:
    """Yield the backend's engine. All ranks of its world take part."""
    world = backends.load(execution.backend).world(execution)
    try:
        recorder = Recorder(listener if world.rank == 0 else None)
        weights = choose_precision(weights, precision, execution, recorder, on_gpu=world.on_gpu)
        with load_engine(weights, world, execution) as engine:
            place = world, world.rank, world.ranks, world.on_gpu
            yield Computation(NATIVE, weights, recorder, engine.evaluate, engine.predict, *place)
    finally:
        world.close()


def find_exported_model(
    source: Path, runtime: str | None, execution: Execution
) -> ExportedModel | None:
    """Return the exported model at a path; None if it is none, or if the native runtime computes
    with its weights."""
    if runtime == NATIVE:
        return None
    if runtime is None and (execution.backend != DEFAULT_BACKEND or not list_export_runtimes()):
        return None
    return open_exported(source)


def list_export_runtimes() -> list[str]:
    """Return the installed runtimes that run ONNX models on a CPU."""
    return [
        name
        for name, row in RUNTIMES.items()
        if row.runs_onnx and "cpu" in row.precisions and not row.is_missing()
    ]


def _choose_runtime_precision(
    runtime: str, weights: Weights, requested: str | None, execution: Execution, recorder: Recorder
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if the
    runtime lacks that.

    Raises `BackendError` if the runtime lacks the requested one.
    """
    device = choose_device(runtime, execution)
    why = explain_refusal(runtime, requested or weights.recipe.precision, device)
    if why and requested is not None:
        raise BackendError(why)
    if why:
        recorder.note(
            f"computes in fp32, not in the recipe's {weights.recipe.precision}:"
            f" {why.partition(';')[0]}"
        )
    return weights.replace_precision("fp32" if why else requested)
