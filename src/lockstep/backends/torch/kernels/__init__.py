"""Fused kernels in Triton, and whether a run uses them. Only the modules of this folder with
kernels import Triton."""

import os
from importlib.util import find_spec

import torch

from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError

AUTO_USES_KERNELS = False
"""Whether `fused: auto` uses the kernels where they run. It becomes True when a campaign on a GPU
(docs/explanation/gpu.md) has shown that they are right and that the contender "lockstep, fused" is
faster than "lockstep"."""
OLDEST_GPU = 8, 0
"""The oldest compute capability that Triton supports, as its own documentation says."""


def uses_kernels(execution: Execution, device: torch.device) -> bool:
    """Return whether a run on this device uses fused kernels.

    Raises `BackendError` if the execution asks for them and they cannot run there.
    """
    if execution.fused == "off" or (execution.fused == "auto" and not AUTO_USES_KERNELS):
        return False
    why_not = obstacle(device)
    if why_not and execution.fused == "on":
        raise refusal(why_not)
    return not why_not


def uses_update_kernel(recipe: Recipe, execution: Execution, device: torch.device) -> bool:
    """Return whether a run on this device updates its weights with the fused kernel, which computes
    SGD alone.

    Raises `BackendError` if the execution asks for it and it cannot.
    """
    is_used = uses_kernels(execution, device)
    if is_used and recipe.optimizer != "sgd" and execution.fused == "on":
        raise refusal(f"the fused update computes SGD alone, not {recipe.optimizer}")
    return is_used and recipe.optimizer == "sgd"


def obstacle(device: torch.device) -> str:
    """Return why kernels cannot run on a device; "" if they can.

    On a CPU they run in Triton's interpreter, which takes seconds for a step, if TRITON_INTERPRET
    is set.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "the run computes on a CPU"
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return "Triton needs a GPU of compute capability 8.0 or newer"
    return ""


def refusal(why: str) -> BackendError:
    """Return the error of an execution that asks for fused kernels where they cannot run."""
    return BackendError(
        f"fused is on, but {why}; use --set fused=auto, which computes with PyTorch's own kernels"
    )
