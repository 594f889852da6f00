"""What evaluations and predictions compute with: an engine that holds the weights, in a precision
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
from lockstep.inference.engines import (
    AUTO,
    ENGINES,
    NATIVE,
    check_engine,
    device_of,
    open_engine,
    refusal,
)
from lockstep.inference.engines.choosing import fastest
from lockstep.inference.engines.exported import Exported, exported_file, open_exported
from lockstep.inference.engines.scoring import scores
from lockstep.inference.loaded_engine import engine_with, in_usable_precision
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
    """An open engine, and what it computes with."""

    engine: str
    """Its name."""
    weights: Weights
    """In the precision that it computes in."""
    recorder: Recorder
    evaluate: Callable[[Iterable[Batch]], Scores]
    """Returns the scores of every image that is not padding, of all ranks."""
    predict: Callable[[np.ndarray], np.ndarray]
    """Returns the logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
    world: backends.World | None = None
    """That of the backend's engine; None for other engines."""
    rank: int = 0
    ranks: int = 1
    on_gpu: bool = False


@contextmanager
def computing(
    engine: str,
    weights: Weights,
    precision: str | None,
    execution: Execution,
    listener: Listener | None,
    *,
    most_images: int,
    exported: Exported | None = None,
    shares_cores: bool = False,
) -> Iterator[Computing]:
    """Yield an engine that holds the weights, or runs an exported model. `engine` is a name, or
    "auto".

    `precision` is the one that was asked for; None: the recipe's, or fp32 if that is not in
    hardware, with a note. `most_images` is the largest batch. `shares_cores`: other threads need
    the cores between two batches.
    """
    recorder = Recorder(listener if is_leading() else None)
    if exported is not None and engine == AUTO:
        engine = next(iter(engines_of_exports()), "onnxruntime")
    elif engine == AUTO:
        weights = in_fast_precision(weights, precision, execution, recorder)
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        engine = fastest(weights, execution, recorder) if alone else NATIVE
    check_engine(engine, execution.backend)
    if engine == NATIVE:
        with _native(weights, precision, execution, listener) as found:
            yield found
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BackendError(
            f"the engine {engine} computes in one process; start it without a launcher, or use"
            f" --engine {NATIVE}"
        )
    weights = in_precision_of(engine, weights, precision, execution, recorder)
    model = None if exported is None else exported.model
    how: dict[str, Any] = {
        "most_images": most_images,
        "exported": model,
        "shares_cores": shares_cores,
    }
    with open_engine(engine, weights, execution, **how) as opened:
        evaluate = partial(scores, opened)
        yield Computing(engine, weights, recorder, evaluate, opened.predict, on_gpu=opened.on_gpu)


@contextmanager
def _native(
    weights: Weights, precision: str | None, execution: Execution, listener: Listener | None
) -> Iterator[Computing]:
    """Yield the backend's engine. All ranks of its world take part."""
    world = backends.load(execution.backend).world(execution)
    try:
        recorder = Recorder(listener if world.rank == 0 else None)
        weights = in_usable_precision(weights, precision, world, execution, recorder)
        with engine_with(weights, world, execution) as engine:
            place = world, world.rank, world.ranks, world.on_gpu
            yield Computing(NATIVE, weights, recorder, engine.evaluate, engine.predict, *place)
    finally:
        world.close()


def export_to_run(source: Path, engine: str | None, execution: Execution) -> Exported | None:
    """Return the exported model at a path; None if it is none, or if the backend's engine computes
    with its weights."""
    if engine == NATIVE or (
        engine is None and (execution.backend != DEFAULT_BACKEND or not engines_of_exports())
    ):
        return None
    file = exported_file(source)
    return None if file is None else open_exported(file)


def engines_of_exports() -> list[str]:
    """Return the installed engines that run ONNX models on a CPU."""
    return [
        name
        for name, row in ENGINES.items()
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
        return weights.with_precision(asked)
    recorder.note(
        f"computes in fp32; {emulated}. To keep the recipe's precision: --set precision={precision}"
    )
    return weights.with_precision("fp32")


def in_precision_of(
    engine: str, weights: Weights, asked: str | None, execution: Execution, recorder: Recorder
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if the
    engine lacks that.

    Raises `BackendError` if the engine lacks the requested one.
    """
    device = device_of(engine, execution)
    why = refusal(engine, asked or weights.recipe.precision, device)
    if why and asked is not None:
        raise BackendError(why)
    if why:
        recorder.note(
            f"computes in fp32, not in the recipe's {weights.recipe.precision}:"
            f" {why.partition(';')[0]}"
        )
    return weights.with_precision("fp32" if why else asked)
