"""Save a run's state."""

from pathlib import Path

import numpy as np

from lockstep.models.state import State
from lockstep.runs import divergence
from lockstep.runs.context import RunContext
from lockstep.runs.hooks import make_hooks
from lockstep.system import heartbeat
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import settle_identity


@heartbeat.saving()
def save(run: RunContext) -> None:
    """Write a checkpoint of the last step, on rank 0, and delete old ones."""
    if not run.leads:
        return
    state = run.engine.read()
    if not all(np.isfinite(value).all() for value in state.tensors.values()):
        message = divergence.describe_bad_weights(state.step, run.recipe, run.checkpoints)
        run.diverge(state.step, message)
    run.recorder.flush()
    path = write_checkpoint(run, state)
    drop_old_checkpoints(run)
    run.recorder.send({"kind": "save", "step": state.step, "path": str(path)})
    call_hooks(run, state)
    run.copy()


def drop_old_checkpoints(run: RunContext) -> None:
    """Remove the checkpoints that are neither the newest ones nor the best one."""
    best = run.find_best()
    best_step = None if best is None else best["step"]
    checkpoint.prune(run.checkpoints, run.execution.keep_checkpoints, best_step)


def write_checkpoint(run: RunContext, state: State) -> Path:
    """Write a checkpoint and return its path."""
    about = {
        "recipe": run.recipe.fields(),
        "classes": run.sets.training.classes,
        "step": state.step,
    }
    if run.scales:
        about["scales"] = run.scales
    identity = settle_identity(run.out)
    path = checkpoint.save(
        run.checkpoints, state, data_digest=run.data_digest, about=about, run_id=identity.id
    )
    settle_identity(run.out)  # with this checkpoint
    return path


def open_hooks(run: RunContext) -> None:
    """Open the hooks that the execution asks for. Raises `CheckpointError` if one cannot work."""
    run.hooks = make_hooks(run.recipe, run.execution, run.steps_per_epoch)


def call_hooks(run: RunContext, state: State) -> None:
    """Call the hooks that run after each checkpoint."""
    for hook in run.hooks:
        hook(state)
