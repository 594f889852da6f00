"""The protocol between the core and a framework.

A backend is a module `lockstep.backends.<name>` with the functions of `Backend`. Its engine
executes training steps on batches and reads and writes its whole state in canonical form:
torchvision's tensor names, OIHW kernels, (out, in) classifier, float32. The engine owns its
compiled step and its queue. All policy is in the core.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lockstep.data import Batch
from lockstep.models.metrics import Counts, Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe

if TYPE_CHECKING:
    from lockstep.launch.nodes import Start, Table


@dataclass(frozen=True)
class Interval:
    """The results of some consecutive steps, over all ranks."""

    first: int
    """Number of the first step. Steps count from 0."""
    losses: np.ndarray
    """float64 [steps]: mean training loss of each global batch, with the targets of the recipe."""
    counts: Counts
    """Counts of the training images. Hits are counted against each image's own label."""
    loss_scale: float
    """Loss scale after the last step; 1 without loss scaling."""
    finished_at: float
    """`time.perf_counter` when the last step was done, as precisely as is known without waiting for
    it."""

    @classmethod
    def from_table(
        cls, first: int, table: np.ndarray, loss_scale: float, finished_at: float
    ) -> "Interval":
        """Return the interval of a table [steps, 4 or more]: sum of the losses, top-1 and top-5
        hits, number of images."""
        loss_sum, top1, top5, images = table[:, :4].sum(axis=0)
        counts = Counts(float(loss_sum), int(top1), int(top5), int(images))
        return cls(first, table[:, 0] / table[:, 3], counts, loss_scale, finished_at)


class Handle(Protocol):
    """Steps that were enqueued."""

    @property
    def first(self) -> int:
        """Number of the first step."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    @property
    def ready(self) -> bool:
        """Whether the steps are done, so that `fetch` does not wait."""


class World(Protocol):
    """This process as one of the processes that train together."""

    rank: int
    ranks: int
    device: str
    """Name of the device that the engine computes on, for people."""
    on_gpu: bool

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Every rank must call it."""

    def same(self, value: int) -> bool:
        """Return whether all ranks gave the same value. Every rank must call it."""

    def wait(self) -> None:
        """Wait until every rank calls this."""

    def close(self) -> None:
        """Leave the process group."""


class HostQuestions:
    """`any`, `same` and `wait` of a `World`, from the largest value of all ranks.

    The hosts exchange the values, so the exchange does not wait for the device.
    """

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Every rank must call it."""
        return bool(self._largest([int(flag)])[0])

    def same(self, value: int) -> bool:
        """Return whether all ranks gave the same value. Every rank must call it."""
        largest, negated_smallest = self._largest([value, -value])
        return largest == -negated_smallest

    def wait(self) -> None:
        """Wait until every rank calls this."""
        self.any(False)

    def _largest(self, values: list[int]) -> list[int]:
        """Return the largest value over all ranks, for every position of the list."""
        raise NotImplementedError


class Engine(Protocol):
    """Executes training steps; a context manager.

    `fetch`, `evaluate`, `predict` and `read` wait for the device. `train` does not wait for the
    steps that it enqueues, unless they are many.
    """

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *error: object) -> None: ...

    def train(self, batches: Iterable[Batch], first: int) -> Handle:
        """Enqueue one optimizer step for every batch, numbered from `first`.

        Every rank must call it, with the same number of batches.
        """

    def fetch(self, handle: Handle) -> Interval:
        """Wait for the steps and return their results over all ranks, without an exchange with
        other ranks."""

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks, and the logits if
        they are wanted. Every rank must call it.

        They are computed in the precision of `Recipe.evaluation_recipe`.
        """

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of images [N, size, size, 3]: uint8, or float32 in
        the same units."""

    def read(self) -> State:
        """Return a copy of the state. With local batch norm, the statistics are those of rank 0."""

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if a name is missing or unknown, or a shape
        does not fit."""

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False: immediately, through training, and in states
        that are written later.

        `masks` are bool arrays by parameter name, each with the shape of its parameter. They
        replace all masks set before. Gradients are masked before any other use, so that velocities
        and moving averages are 0 there, too. Raises `CheckpointError` if a mask does not fit.
        """


class QuantisingEngine(Engine, Protocol):
    """An engine that computes as `lockstep.models.quantisation` describes, if the recipe's
    `quantisation` is "int8"."""

    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the largest magnitude of the input of every quantised layer, by name, over all
        images.

        The images pass through the present weights in inference, without quantisation and MixUp.
        Other ranks do not take part.
        """

    def quantise(self, scales: Mapping[str, float]) -> None:
        """Quantise the inputs of layers with these scales from here on. Until then, scales are
        arbitrary.

        Raises `CheckpointError` if they do not fit the model.
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

    def engine(
        self, recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution
    ) -> Engine:
        """Build the recipe's model and its compiled step. Weights are arbitrary until `write`."""

    def load_module(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> Any:
        """Return the framework's own module with these tensors, ready for inference. It computes
        without quantisation."""

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Trace what the framework does while the context is entered, into a file in `folder` that
        its own viewer opens.

        No work may be enqueued when the context is entered. When it is left, it waits for all
        enqueued work. Tracing does not change the numbers.
        """

    def devices(self) -> list[str]:
        """Return the names of the devices that the framework sees, for people."""

    def libraries(self) -> dict[str, Any]:
        """Return `threads`, the number used on a CPU, and the versions of `cuda`, `cudnn` and
        `onednn` that are known."""

    def products(self, on_gpu: bool) -> Products:
        """Return how the framework multiplies matrices, to measure the ceiling of a machine."""

    def prepare_ranks(self, table: "Table", distributed: str) -> "AbstractContextManager[Start]":
        """Return a context within which the ranks of a table can run. It yields how those of this
        machine are started.

        `distributed` is the field of the `Execution` that the ranks will have. Servers that the
        ranks need run within the context. A backend that trains in one process does not have this
        function.
        """
