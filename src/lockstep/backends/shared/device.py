"""The device that a process computes on, and the errors if it is missing or too small: the same on
every engine."""

from lockstep.recipes import Execution
from lockstep.system.errors import BackendError


def choose_gpu(
    execution: Execution, framework: str, *, gpus: int, local_rank: int, advice: str = ""
) -> int | None:
    """Return the number of the GPU that this process computes on; None: it computes on the CPU.

    `gpus` is how many the framework finds, `advice` what to do if it finds none. Raises
    `BackendError` if the execution asks for a GPU that is not there.
    """
    if execution.device == "cpu" or (execution.device == "auto" and not gpus):
        return None
    if not gpus:
        message = (
            f"device is cuda, but {framework} finds no GPU here; use --set device=cpu, in"
            ' Python device="cpu", or see `lockstep doctor`'
        )
        raise BackendError(f"{message}. {advice}" if advice else message)
    if local_rank >= gpus:
        raise BackendError(
            f"local rank {local_rank} has no GPU: there are only {gpus}; launch fewer processes"
        )
    return local_rank


def build_memory_error(images: int | None, parts: int, reason: str) -> BackendError:
    """Return what to raise if a step of this many images, in this many parts, does not fit into
    memory. None: unknown."""
    what = "a step" if images is None else f"{images} images"
    return BackendError(
        f"the device has too little memory for {what} in {parts} parts: {reason}\n"
        f"In training, compute a step in more parts: --set accumulation_steps={2 * parts}; else use"
        " smaller batches: --batch (serve: --max-batch)"
    )
