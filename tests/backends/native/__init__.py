"""What the suite needs of a framework itself: a module for each, with the same names in it.

| name | what it is |
|---|---|
| FACTS | what can be said without the framework's code: `Facts` |
| find_obstacle | why the engine cannot compute in a precision on this processor; None if it can |
| images | float32 [N, H, W, 3], normalised, as a loaded module takes them |
| array | what a loaded module returns, as an array |
| exhaust_host | to call instead of the step: fails as the framework does if the host lacks memory |
| step_in_groups | weights after a step of the framework's own optimizer with Nesterov's momentum |
| count_differentiated_convolutions | how many convolutions a step computes backwards |

If the backend's row has a module:

| name | what it is |
|---|---|
| exhaust_gpu | to call instead of the step: fails as the framework does if a GPU lacks memory |
| find_trained | names of the tensors of a loaded module that the framework trains |
| gradients | by such a tensor: gradients of the sum of the squares of a loaded module's logits |
| set_gpus | makes the framework find a number of GPUs |
| loss_scale | the engine's loss scale |
| take_own_steps | a decayed weight after steps of a recipe with one of `FACTS.optimizers` |
| take_step | weights of 1 after a step of plain descent at a rate of 0.5, by scaled gradients |

If the framework has switches for TensorFloat-32 without a GPU: `tensorfloat` returns them and
`set_tensorfloat` sets them.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

LEFT_TO_SOAK = {"tensorflow": ("test_full_models", "test_masks", "test_trajectories")}
"""By backend: modules of tests that `make test` has no time for, because building a step takes
seconds. `test_sparse_runs` has masks, too. It is read before a framework is imported."""


Groups = Sequence[tuple[np.ndarray, np.ndarray, float]]
"""Weights, their gradient and their rate: a group of parameters for each tensor."""
Steps = Sequence[tuple[np.ndarray, float]]
"""Gradients of the same weights with the rates of the steps, in order."""


@dataclass(frozen=True)
class Facts:
    """What tests know of a backend without the framework's code."""

    step: str
    """An engine's attribute that is called in every step."""
    reason: str
    """What the framework reports if the host lacks memory."""
    full: str = ""
    """What the framework reports if a GPU lacks memory."""
    advice: str = ""
    """A pattern of the advice where the framework finds no GPU."""
    weights: tuple[str, str, tuple[str, ...]] = ("", "", ())
    """A target of `lockstep convert` in a format of the framework, a file, and its parts."""
    last_rank: Mapping[str, str] = field(default_factory=dict)
    """Variables of the last rank in `test_starting`."""
    optimizers: tuple[str, ...] = ()
    """Optimizers with second moments that the framework has, by the names of recipes."""
    batch: str = "16 images"
    """The message's words for 16 images that do not fit into memory."""
    logits: type[np.floating[Any]] = np.float32
    """The dtype of the logits of a loaded module."""
    any_size: bool = True
    """Whether a loaded module with SAME padding takes images of any size."""
    borrows: bool = False
    """Whether the engine borrows the memory of lent images on a CPU."""
    compile: str = "off"
    """Whether engines are compiled if a test does not choose: where a graph is built quickly."""
    counted: str = "off"
    """Whether engines are compiled whose convolutions are counted."""
    scenarios: tuple[str, ...] | None = None
    """The scenarios of `test_ranks` that `make test` has time for; None: all."""
    compiles_quickly: bool = False
    """Whether compiling a tiny model takes a second at most."""


def find(name: str) -> ModuleType:
    """Return the module of this folder for a backend."""
    return importlib.import_module(f"tests.backends.native.{name}")
