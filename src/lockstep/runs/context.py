"""The context of a run: what its parts (begin, loop, evaluate, save and finish) work on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from lockstep.backends import Engine, World
from lockstep.data import Batch
from lockstep.data.split import Sets
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.best_evaluation import find_best
from lockstep.recipes.order import steps_per_epoch
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DivergedError, Interrupted
from lockstep.system.event_log import DivergedEvent, EvaluateEvent
from lockstep.system.signals import StopRequests
from lockstep.weights import checkpoint

if TYPE_CHECKING:
    from lockstep.models.quantisation import Scales
    from lockstep.runs.starting_weights import Start


@dataclass
class RunContext:
    """One rank's part of a run: what it was opened with, and what is known of it so far."""

    recipe: Recipe
    execution: Execution
    world: World
    engine: Engine
    sets: Sets
    out: Path
    stop: StopRequests
    recorder: Recorder
    rates: np.ndarray
    """The learning rates of all steps."""
    start: "Start | None" = None
    """The weights that a new run starts from, on rank 0; None if they are the recipe's."""
    probe_began: float | None = None
    """`time.perf_counter` when this process began a linear probe; None if it fitted none."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on how the run begins."""
    details: list[str] = field(default_factory=list)
    """Details of the start that few users need."""
    copy: Callable[[], None] = lambda: None
    """Asks for a copy of the folder in an object store."""
    scales: "Scales" = field(default_factory=dict)
    """The scales of a quantised run's inputs."""
    scores: dict[str, Scores] = field(default_factory=dict)
    """The newest evaluation in this process, by weights, on rank 0. Row i is sample i of the index.
    """
    is_stopping: bool = False
    """Whether any rank was asked to stop."""
    waited_sec: float = 0.0
    """Seconds that the current interval or evaluation has waited for batches."""
    data_digest: str = field(init=False)
    """Identifies the images; stored in checkpoints."""
    steps_per_epoch: int = field(init=False)
    total_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.data_digest = self.sets.digest
        self.steps_per_epoch = steps_per_epoch(self.recipe, len(self.sets.training))
        self.total_steps = self.recipe.epochs * self.steps_per_epoch

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone logs and saves."""
        return self.world.rank == 0

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.out / "checkpoints"

    @property
    def part_images(self) -> int:
        """Images that a rank computes at once."""
        parts = self.world.ranks * self.execution.accumulation_steps
        return self.recipe.global_batch_images // parts

    @property
    def weights_to_evaluate(self) -> list[str]:
        """The kinds of weights that are evaluated."""
        return ["trained", "ema"] if self.recipe.ema_decay else ["trained"]

    @contextmanager
    def keep_copies(self) -> Iterator[None]:
        """Copy the folder after each save and at the end of the block, on rank 0, if the execution
        says where."""
        url = self.execution.checkpoint_store
        if not self.leads or not url:
            yield
            return
        from lockstep.runs.run_copies import keep_copies

        with keep_copies(url, self.out, self.recorder.warn, self.recorder.note) as self.copy:
            yield

    def find_best(self) -> EvaluateEvent | None:
        """Return the best evaluation so far, on rank 0; None if there is none."""
        return find_best(self.recorder.evaluations, self.recipe.selection)

    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop; every rank asks before every batch."""
        self.is_stopping = self.is_stopping or self.world.any(self.stop.requested)
        return self.is_stopping

    def interrupt(self, step: int) -> NoReturn:
        """Raise `Interrupted`. The state must be saved already."""
        raise Interrupted(
            f"stopped by {self.stop.name} after step {step} of {self.total_steps}, saved in"
            f" {self.out}; the same command resumes from there",
            self.stop.exit_code,
        )

    def diverge(self, step: int, problem: str, hint: str = "", **figures: Any) -> NoReturn:
        """Log what is not finite after a step, and raise `DivergedError` with the last good
        checkpoint and advice. A `hint` is further advice."""
        older = [saved for saved in checkpoint.steps(self.checkpoints) if saved < step]
        good = "none"
        if older:
            path = checkpoint.checkpoint_path(self.checkpoints, older[-1])
            good = f"{path} (start a new run from it with --weights)"
        message = f"{problem}. Last good checkpoint: {good}. {_advise(self.recipe)}{hint}"
        event = {"kind": "diverged", "step": step, "message": message, **figures}
        self.recorder.log(cast(DivergedEvent, event))
        raise DivergedError(message)

    def time_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield all batches, and add the time spent waiting for each to `waited_sec`."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_sec += time.perf_counter() - began
            if batch is None:
                return
            yield batch


def _advise(recipe: Recipe) -> str:
    advice = "Try a lower lr or a longer warm-up"
    if recipe.precision in ("fp32", "tf32"):
        return f"{advice}."
    if recipe.precision != "fp16":
        return f"{advice}, or precision=fp32."
    if recipe.loss_scaling == "dynamic":
        return f"{advice}, or precision=bf16."
    return f"{advice}, or loss_scaling=dynamic or precision=bf16."


def stop_before_training(stop: StopRequests, activity: str) -> None:
    """Raise `Interrupted` if a stop is requested during an activity before the first step."""
    if stop.requested:
        raise Interrupted(
            f"stopped by {stop.name} while {activity}; nothing was trained yet: repeat the command",
            stop.exit_code,
        )
