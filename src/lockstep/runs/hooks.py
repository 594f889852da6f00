"""What is done after each checkpoint, on rank 0, besides saving it."""

from collections.abc import Callable
from pathlib import Path

from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.weights.readers import nvidia_mxnet

AfterSaving = Callable[[State], None]
"""Called with a state that is saved. It is called again for the newest one when a run resumes."""


def after_saving(recipe: Recipe, execution: Execution, per_epoch: int) -> list[AfterSaving]:
    """Return the hooks that an execution asks for. Raises `CheckpointError` if one cannot do its work."""
    if not execution.model_prefix:
        return []
    prefix = Path(execution.model_prefix)
    nvidia_mxnet.check_prefix(prefix, recipe)

    def write_epoch_for_mxnet(state: State) -> None:
        epoch, step = divmod(state.step, per_epoch)
        if epoch and step == 0:
            nvidia_mxnet.write_epoch(prefix, epoch, recipe, state)

    return [write_epoch_for_mxnet]
