"""Save a run's state."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.runs.context import RunContext
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
        problem = f"the weights are not finite after step {state.step}"
        run.diverge(state.step, problem)
    run.recorder.flush()
    path = write_checkpoint(run, state)
    drop_old_checkpoints(run)
    run.recorder.send({"kind": "save", "step": state.step, "path": str(path)})
    write_for_mxnet(run, state)
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


def check_mxnet_prefix(run: RunContext) -> None:
    """Raise `CheckpointError` if files for MXNet cannot be written where the execution says."""
    if run.execution.model_prefix:
        from lockstep.weights.formats import nvidia_mxnet

        nvidia_mxnet.check_prefix(Path(run.execution.model_prefix), run.recipe)


def write_for_mxnet(run: RunContext, state: State) -> None:
    """Write a saved state for MXNet, at the end of an epoch, if the execution says where."""
    epoch, step = divmod(state.step, run.steps_per_epoch)
    if not run.execution.model_prefix or not epoch or step:
        return
    from lockstep.weights.formats import nvidia_mxnet

    if OPTIMIZERS[run.recipe.optimizer].velocity != "sum":  # the format has SGD's alone
        state = replace(state, momentum={})
    nvidia_mxnet.write_epoch(Path(run.execution.model_prefix), epoch, run.recipe, state)
