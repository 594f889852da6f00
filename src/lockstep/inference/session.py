"""What evaluations and predictions compute with: a runtime that holds the weights, in a precision
that the machine has."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lockstep import backends
from lockstep.inference.engines import choose_precision, load_engine
from lockstep.inference.runtimes import (
    AUTO,
    NATIVE,
    PROGRAM,
    RUNTIMES,
    check_runtime,
    choose_device,
    explain_refusal,
    open_runtime,
)
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder, check_listener
from lockstep.system.errors import BackendError, UserError, nearest
from lockstep.system.machine import gpu
from lockstep.system.ranks import count_ranks, is_leading
from lockstep.weights import Weights

if TYPE_CHECKING:
    from lockstep.inference.runtimes.exported import ExportedModel

BATCH = 32
"""Images in a batch, by default."""


@dataclass(frozen=True)
class SessionOptions:
    """Where and how a model computes."""

    runtime: str | None = None
    """"native": the backend of the execution; another runtime such as "onnxruntime"; "auto", the
    fastest one that is installed; or "program", an export in its own runtime. None: an export that
    can only compute is run as it is, other weights are native."""
    precision: str | None = None
    """None: the recipe's, or fp32 if that is not in hardware, with a note."""
    execution: Execution = field(default_factory=Execution)
    batch: int = BATCH
    """The largest batch, on each rank."""
    listener: Listener | None = None
    """Gets notes on weights, precision and runtime, and progress."""

    @property
    def place(self) -> str:
        """The name of the backend or of the other runtime, if it is chosen already."""
        is_native = self.runtime in (None, NATIVE)
        return self.execution.backend if is_native else str(self.runtime)

    def change(
        self,
        where: str | None = None,
        *,
        device: str | None = None,
        execution: Execution | None = None,
        **settings: Any,
    ) -> Self:
        """Return these with changes, as `Model.on` describes them; what is None stays."""
        changes = {name: value for name, value in settings.items() if value is not None}
        if changes.get("batch", 1) < 1:
            raise UserError(f"batch is {changes['batch']}; expected at least 1")
        check_listener(changes.get("listener"))
        execution = execution or self.execution
        known = [NATIVE, AUTO, PROGRAM, *RUNTIMES]
        if where in backends.FRAMEWORKS:
            execution = execution.replace(backend=where)
            changes["runtime"] = NATIVE
        elif where in known:
            changes["runtime"] = where
        elif where is not None:
            names = nearest(where, [*backends.FRAMEWORKS, *known])
            raise BackendError(f"there is no backend or runtime {where!r}. {names}")
        if device is not None:
            execution = execution.replace(device=device)
        return replace(self, execution=execution, **changes)


@dataclass(frozen=True)
class Session:
    """An open runtime, and what it computes with."""

    runtime: str
    """Its name."""
    weights: Weights
    """The weights, in the precision that it computes in."""
    recorder: Recorder
    evaluate: Callable[..., Scores]
    """Returns the scores of every image of some batches that is not padding, of all ranks; with
    `with_logits=True` also the logits."""
    predict: Callable[[np.ndarray], np.ndarray]
    """Returns the logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
    world: backends.World | None = None
    """The world of the backend's engine; None for other runtimes than the native one."""
    rank: int = 0
    ranks: int = 1
    on_gpu: bool = False
    precision: str = ""
    """The precision of an exported program; "" if it is that of the weights."""
    takes_photos: bool = False
    """Whether it resizes and crops whole photos, as some exported programs do."""


@contextmanager
def open_session(
    weights: Weights,
    options: SessionOptions,
    *,
    exported: "ExportedModel | None" = None,
    shares_cores: bool = False,
) -> Iterator[Session]:
    """Yield a runtime that holds the weights, or runs an exported model. `shares_cores`: other
    threads need the cores between two batches."""
    precision = options.precision
    execution = options.execution
    listener = options.listener
    runtime = options.runtime or (NATIVE if exported is None else AUTO)
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
        runtime = NATIVE
        if ranks == 1:
            from lockstep.inference.runtimes.fastest import choose_fastest

            runtime = choose_fastest(weights, execution, recorder)
    check_runtime(runtime, execution.backend)
    if runtime == NATIVE:
        with _open_native(weights, precision, execution, listener) as session:
            yield session
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
        most_images=options.batch,
        exported=exported,
        shares_cores=shares_cores,
    )
    from lockstep.inference.runtimes.scores import compute_scores

    with opening as opened:
        evaluate = partial(compute_scores, opened.predict, flips=weights.recipe.eval_flips)
        yield Session(runtime, weights, recorder, evaluate, opened.predict, on_gpu=opened.on_gpu)


@contextmanager
def _open_native(
    weights: Weights, precision: str | None, execution: Execution, listener: Listener | None
) -> Iterator[Session]:
    """Yield the backend's engine. All ranks of its world take part."""
    with closing(backends.load(execution.backend).world(execution)) as world:
        recorder = Recorder(listener if world.rank == 0 else None)
        weights = choose_precision(weights, precision, execution, recorder, on_gpu=world.on_gpu)
        with load_engine(weights, world, execution) as engine:
            place = world, world.rank, world.ranks, world.on_gpu
            yield Session(NATIVE, weights, recorder, engine.evaluate, engine.predict, *place)


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
            f"computing in fp32, not in the recipe's {weights.recipe.precision}:"
            f" {why.partition(';')[0]}"
        )
    return weights.replace_precision("fp32" if why else requested)
