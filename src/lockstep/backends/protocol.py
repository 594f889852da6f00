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
    """The results of consecutive steps, over all ranks."""

    first: int
    """The number of the first step, from 0."""
    losses: np.ndarray
    """The mean training loss of each global batch, with the recipe's targets: float64 [steps]."""
    counts: Counts
    """Counts of the training images. Hits are counted against each image's own label."""
    loss_scale: float
    """The loss scale after the last step; 1 without loss scaling."""
    finished_at: float
    """`time.perf_counter` when the last step was done, or later if knowing that needs a wait."""

    @classmethod
    def from_table(
        cls, first: int, table: np.ndarray, loss_scale: float, finished_at: float
    ) -> "Interval":
        """Return the interval of a table of sums over all ranks.

        Args:
            first: The number of the first step.
            table: [steps, 4 or more]: sum of losses, top-1 hits, top-5 hits, number of images.
            loss_scale: The loss scale after the last step.
            finished_at: When the last step was done.
        """
        loss_sum, top1, top5, images = table[:, :4].sum(axis=0)
        counts = Counts(float(loss_sum), int(top1), int(top5), int(images))
        return cls(first, table[:, 0] / table[:, 3], counts, loss_scale, finished_at)


class Handle(Protocol):
    """Steps that were enqueued."""

    @property
    def first(self) -> int:
        """The number of the first step."""

    @property
    def steps(self) -> int:
        """The number of steps."""

    @property
    def ready(self) -> bool:
        """Whether the steps are done, so that `fetch` does not wait."""


class World(Protocol):
    """This process as one of the processes that train together."""

    rank: int
    """The number of this process, from 0."""
    ranks: int
    """The number of processes."""
    device: str
    """The name of the device that the engine computes on, to show to users."""
    on_gpu: bool
    """Whether that is a GPU."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Every rank must call it."""

    def same(self, value: int) -> bool:
        """Return whether all ranks gave the same value. Every rank must call it."""

    def wait(self) -> None:
        """Wait until every rank calls this."""

    def close(self) -> None:
        """Leave the process group."""


class HostQuestions:
    """`any`, `same` and `wait` of a `World`: hosts exchange values and wait for no device."""

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
        """Enqueue one optimizer step for every batch. Every rank must call it.

        Args:
            batches: This rank's parts of the global batches; all ranks have equally many.
            first: The number of the first step, from 0.

        Returns:
            The steps, for `fetch`.
        """

    def fetch(self, handle: Handle) -> Interval:
        """Wait for steps; return their results over all ranks. Ranks exchange nothing here."""

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of all ranks for every image that is not padding.

        Every rank must call it. `Recipe.evaluation_recipe` sets the precision.

        Args:
            batches: This rank's batches.
            ema: Whether to use the moving average instead of the trained weights.
            with_logits: Whether the scores have the logits.
        """

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits].

        Args:
            images: [N, size, size, 3], uint8, or float32 in the same units.
        """

    def read(self) -> State:
        """Return a copy of the state. With local batch norm, the statistics are those of rank 0."""

    def write(self, state: State) -> None:
        """Replace the state.

        Raises:
            CheckpointError: A name is missing or unknown, or a shape does not fit.
        """

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False: at once, in training, in states written later.

        Gradients are masked before any other use, so velocities and moving averages are 0, too.

        Args:
            masks: A bool array per parameter name, shaped like it. They replace earlier masks.

        Raises:
            CheckpointError: A mask does not fit.
        """


class QuantisingEngine(Engine, Protocol):
    """An engine that also quantises (`lockstep.models.quantisation`)."""

    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the largest input magnitude of every quantised layer, by name, over all images.

        The images pass through the present weights on this rank, without quantisation and MixUp.
        """

    def quantise(self, scales: Mapping[str, float]) -> None:
        """Quantise the inputs of layers with these scales from here on; before, they are arbitrary.

        Raises:
            CheckpointError: The scales do not fit the model.
        """


@dataclass(frozen=True)
class Products:
    """How a framework multiplies matrices."""

    tensor: Callable[[np.ndarray, str], Any]
    """Puts an array onto the device, in a precision such as "bf16"."""
    wait: Callable[[Any], object]
    """Waits until a result has been computed."""
    product: Callable[[Any, Any], Any] = operator.matmul
    """Multiplies two tensors."""


class Backend(Protocol):
    """The functions of a backend's module."""

    def world(self, execution: Execution) -> World:
        """Join the process group and choose the device."""

    def engine(
        self, recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution
    ) -> Engine:
        """Return an engine of the recipe's model. Its weights are arbitrary until `write`.

        Args:
            recipe: What the engine computes.
            learning_rates: The learning rate of every step, float64 [steps].
            world: What `world` returned.
            execution: How the engine computes.
        """

    def load_module(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> Any:
        """Return the framework's own module, ready for inference without quantisation.

        Args:
            recipe: The recipe of the weights.
            tensors: The weights in canonical form, by name.
        """

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Trace what the framework does in the context, into a file for its own viewer.

        No work is enqueued on entry; on exit, wait for all of it. Tracing changes no numbers.
        """

    def devices(self) -> list[str]:
        """Return the names of the devices that the framework sees, to show to users."""

    def libraries(self) -> dict[str, Any]:
        """Return `threads` on a CPU, and the versions of `cuda`, `cudnn` and `onednn` if known."""

    def products(self, on_gpu: bool) -> Products:
        """Return how the framework multiplies matrices, to measure the ceiling of a machine."""

    def prepare_ranks(self, table: "Table", distributed: str) -> "AbstractContextManager[Start]":
        """Return a context for the ranks of a table, which yields how to start this machine's.

        Servers that the ranks need run within it. Leave this out if you train in one process.

        Args:
            table: All machines and their ranks.
            distributed: The field of the `Execution` that the ranks will have.
        """
