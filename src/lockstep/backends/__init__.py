"""The protocol between the core and a framework.

A backend is a module `lockstep.backends.<name>` with the functions of `Backend`. Its engine executes training steps on
batches and reads and writes its whole state in canonical form: torchvision's tensor names, OIHW kernels, (out, in)
classifier, float32. It owns its compiled step and its queue; it owns no policy.
"""

import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from lockstep.backends.frameworks import FRAMEWORKS, Framework
from lockstep.data import Batch
from lockstep.models.metrics import Counts, Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, nearest

__all__ = [
    "FRAMEWORKS",
    "Backend",
    "Engine",
    "Framework",
    "Handle",
    "HostQuestions",
    "Interval",
    "Products",
    "World",
    "check_installed",
    "interpreter",
    "load",
    "refuse_horovod",
    "refuse_layout",
]


@dataclass(frozen=True)
class Interval:
    """What some consecutive steps brought, over all ranks."""

    first: int
    """The first step's number; steps count from 0."""
    losses: np.ndarray
    """float64 [steps]: mean training loss of each global batch (smoothed and mixed as the recipe says)."""
    counts: Counts
    """Of the training images, against their own labels."""
    loss_scale: float
    """After the last step; 1 without loss scaling."""
    finished_at: float
    """`time.perf_counter` when the last step was done, as nearly as is known without waiting for it."""


class Handle(Protocol):
    """Steps that were enqueued."""

    @property
    def first(self) -> int:
        """The first step's number."""

    @property
    def steps(self) -> int:
        """How many there are."""

    @property
    def ready(self) -> bool:
        """Whether they are done, so that `fetch` does not wait."""


class World(Protocol):
    """This process among those that train together."""

    rank: int
    ranks: int
    device: str
    """What the engine computes on, as a person would name it."""
    on_gpu: bool

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; every rank must ask."""

    def same(self, value: int) -> bool:
        """Return whether all ranks gave the same value; every rank must ask."""

    def close(self) -> None:
        """Leave the process group."""


class HostQuestions:
    """What a `World` asks of all ranks, from the largest value of any; on the hosts, not behind the device's work."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; every rank must ask."""
        return bool(self._largest([int(flag)])[0])

    def same(self, value: int) -> bool:
        """Return whether all ranks gave the same value; every rank must ask."""
        largest, negated_smallest = self._largest([value, -value])
        return largest == -negated_smallest

    def _largest(self, values: list[int]) -> list[int]:
        """Return the largest of all ranks for every place."""
        raise NotImplementedError


class Engine(Protocol):
    """Executes training steps; a context manager. Only `fetch`, `evaluate`, `predict` and `read` wait for the device."""

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *error: object) -> None: ...

    def train(self, batches: Iterable[Batch], first: int) -> Handle:
        """Enqueue one optimizer step for every batch, numbered from `first`. Every rank must ask, with as many batches."""

    def fetch(self, handle: Handle) -> Interval:
        """Wait for the steps and return what they brought over all ranks; asks no other rank."""

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Scores:
        """Return the scores of every image that is not padding, of all ranks. Every rank must ask."""

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""

    def read(self) -> State:
        """Return a copy of the state; with local batch norm, the statistics of rank 0."""

    def write(self, state: State) -> None:
        """Take over a state; `CheckpointError` if a name is missing or unknown, or a shape is another."""

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep the weights where a mask is False at 0: now, through training, and in states written later.

        `masks` are bool arrays by parameter name, each of its parameter's shape; those set before are forgotten. Gradients
        are masked before anything else is done with them, so that velocities and moving averages are 0 there too.
        `CheckpointError` if a mask does not fit.
        """


@dataclass(frozen=True)
class Products:
    """How a framework multiplies matrices."""

    tensor: Callable[[np.ndarray, str], Any]
    """Put an array onto the device, in a precision such as "bf16"."""
    wait: Callable[[Any], object]
    """Return when a result has been computed."""
    product: Callable[[Any, Any], Any] = operator.matmul


class Backend(Protocol):
    """The functions of a backend's module."""

    def world(self, execution: Execution) -> World:
        """Join the process group and choose the device."""

    def engine(self, recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution) -> Engine:
        """Build the recipe's model and its compiled step. The weights are arbitrary until `write`."""

    def load_module(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> Any:
        """Return the framework's own module, holding these tensors, ready for inference."""

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Trace what the framework does while the context is entered, into a file in `folder` that its own viewer opens.

        No work is enqueued when it is entered; when it is left, it waits for all that is. The numbers stay the same.
        """

    def devices(self) -> list[str]:
        """Return the devices the framework sees, as a person would name them."""

    def libraries(self) -> dict[str, Any]:
        """Return `threads`, the number used on a CPU, and the versions of `cuda`, `cudnn` and `onednn` that are known."""

    def products(self, on_gpu: bool) -> Products:
        """Return how the framework multiplies matrices, to measure the ceiling of a machine."""

    def launch(self, processes: int, arguments: list[str], distributed: str) -> int:
        """Run this Python with these arguments in this many processes on this machine; return the exit code.

        `distributed` is that of the `Execution` they will have.
        """


def refuse_horovod(distributed: str) -> None:
    """Raise `BackendError` if Horovod is asked for; for backends that do not have it."""
    if distributed == "horovod":
        raise BackendError(
            "Horovod adds up for TensorFlow's and MXNet's engines alone; leave out distributed, or take --backend "
            "tensorflow or mxnet"
        )


def refuse_layout(asked: str, own: str) -> None:
    """Raise `BackendError` if another layout is asked for than a backend's own; for backends that do not have both."""
    if asked not in ("auto", own):
        raise BackendError(
            f"layout is {asked}, but this engine computes in {own} on this device; leave it at auto, or take --backend torch"
        )


def check_installed(name: str) -> None:
    """Raise `BackendError` if there is no backend of that name or its framework is missing; imports nothing."""
    if name not in FRAMEWORKS:
        raise BackendError(f"there is no backend {name!r}. {nearest(name, FRAMEWORKS)}")
    framework = FRAMEWORKS[name]
    if framework.version() is None:
        raise BackendError(f"backend {name!r} needs {framework.distributions[0]}: {framework.install}")


def load(name: str) -> Backend:
    """Import a backend. Raises `BackendError` if there is none of that name or its framework is missing."""
    check_installed(name)
    # Read by GNU's OpenMP when the framework loads it. By default its threads wait for each other spinning, so that beside
    # another busy program a step takes many times its share; giving way early costs 1 to 2 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    return cast(Backend, importlib.import_module(f"lockstep.backends.{name}"))


def interpreter(name: str) -> Path | None:
    """Return the Python that can run a backend in a process of its own; None if there is none.

    It is the one that LOCKSTEP_<NAME>_PYTHON names; or this one, if the framework is installed here; or that of an
    environment `.venv-<name>` beside this one. Raises `BackendError` if the variable names nothing that can be run.
    """
    variable = f"LOCKSTEP_{name.upper()}_PYTHON"
    if named := os.environ.get(variable):
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise BackendError(f"{variable} is {named!r}, expected a Python that has lockstep and {name}")
        return Path(named)
    if FRAMEWORKS[name].version() is not None:
        return Path(sys.executable)
    beside = Path(sys.prefix).parent / f".venv-{name}" / "bin" / "python"
    return beside if beside.is_file() else None
