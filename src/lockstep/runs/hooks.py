"""Hooks: functions that rank 0 calls after it has saved a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.weights.formats.format_list import FORMATS

Hook = Callable[[State], None]
"""A function that is called with each saved state. When a run resumes, it is called again with the
newest one."""


def make_hooks(recipe: Recipe, execution: Execution, steps_per_epoch: int) -> list[Hook]:
    """Return the hooks that an execution asks for. Raises `CheckpointError` if one cannot work."""
    if not execution.model_prefix:
        return []
    prefix = Path(execution.model_prefix)
    nvidia_mxnet = FORMATS["nvidia_mxnet"].load()
    nvidia_mxnet.check_prefix(prefix, recipe)

    def write_epoch_for_mxnet(state: State) -> None:
        epoch, step = divmod(state.step, steps_per_epoch)
        if OPTIMIZERS[recipe.optimizer].velocity != "sum":  # the format has SGD's alone
            state = replace(state, momentum={})
        if epoch and step == 0:
            nvidia_mxnet.write_epoch(prefix, epoch, recipe, state)

    return [write_epoch_for_mxnet]
