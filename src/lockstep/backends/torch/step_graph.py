"""A step as one CUDA graph: captured once, and replayed for every later step.

What a graph replays is exactly what was captured: the same kernels on the same memory. A step
therefore reads everything that changes from tensors that keep their memory: the batch from buffers,
the rest from tables and counters on the device (`update`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from lockstep.backends.torch.world import TorchWorld
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError

WARM_UP = 3
"""Steps of a shape that run without a graph before one is captured. In them kernels are compiled
and chosen, which a capture forbids. PyTorch's `make_graphed_callables` takes three, too."""
AUTO = False
"""Whether `cuda_graph: auto` captures. An H200 repeated steps of a graph bit for bit, but
nobody timed them: this becomes true when a campaign shows that they are faster than plain steps
(docs/results/gpu.md)."""

Work = Callable[[Sequence[Tensor]], Tensor]


class Capturer(Protocol):
    """What captures the work that a device is given."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Return a context in which work is enqueued as capturing needs it beforehand. It is
        computed."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Call `work` and capture what it enqueues, none of which is computed. It may wait for the
        device.

        Returns what enqueues all of it, and the tensor that `work` returned, which is written each
        time.
        """

    def wait(self) -> None:
        """Wait for the device."""


class CudaCapturer:
    """Captures CUDA graphs on a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Enqueue on the captured stream: autograd remembers the stream of its first use."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Return the replay of a graph and the result in its memory."""
        graph = torch.cuda.CUDAGraph()
        # The outer context: after an error, `torch.cuda.graph` leaves its own stream current.
        # "thread_local": threads that decode images may call CUDA meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return graph.replay, result

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def make_capturer(execution: Execution, world: TorchWorld) -> CudaCapturer | None:
    """Return what captures the steps of an execution; None if they are not captured.

    Raises `BackendError` if `cuda_graph` is "on" with several ranks: their gradients are exchanged
    by threads of DistributedDataParallel, whose bookkeeping a graph would leave out.
    """
    if execution.cuda_graph == "on" and world.ranks > 1:
        raise BackendError(
            "cuda_graph is on, but gradients are added up over several ranks; leave out cuda_graph,"
            " or use --set cuda_graph=off"
        )
    is_wanted = execution.cuda_graph == "on" or (execution.cuda_graph == "auto" and AUTO)
    if is_wanted and world.on_gpu and world.ranks == 1:
        return CudaCapturer(world.torch_device)
    return None


class StepGraph:
    """Takes steps: the first ones of a shape as they are, the later ones by a captured graph. Every
    step is taken once."""

    def __init__(
        self, work: Work, capturer: Capturer | None, finish: Callable[[], object] | None = None
    ) -> None:
        """Take what computes a step: columns of a batch to a tensor with its sums.

        `finish` is called after a step was captured, before the graph is replayed. Without a
        capturer every step is taken as it is.
        """
        self._work = work
        self._capturer = capturer
        self._finish = finish
        self.is_capturing = False
        """Whether the step that is being computed is captured."""
        self._captured: _Captured | None = None
        self._shapes: object = None
        self._taken = 0

    def forget(self) -> None:
        """Forget the graph, because a step now computes something else. It waits for the steps that
        use it."""
        if self._captured is not None and self._capturer is not None:
            self._capturer.wait()
        self._captured = None
        self._shapes = None
        self._taken = 0

    def __call__(self, columns: Sequence[Tensor]) -> Tensor:
        """Take one step on the columns of a batch, and return its sums, which no later step
        changes.

        Raises `BackendError` if the step cannot be captured. PyTorch promises little of what
        follows a failed capture.
        """
        if self._capturer is None:
            return self._work(columns)
        shapes = [(column.shape, column.dtype) for column in columns]
        if shapes != self._shapes:
            self.forget()
            self._shapes = shapes
        if self._taken < WARM_UP:
            self._taken += 1
            with self._capturer.warming_up():
                return self._work(columns)
        if self._captured is None:
            self._captured = self._capture(columns, self._capturer)
        return self._captured.take(columns)

    def _capture(self, columns: Sequence[Tensor], capturer: Capturer) -> "_Captured":
        inputs = [column.clone() for column in columns]
        self.is_capturing = True
        try:
            captured = _Captured(inputs, *capturer.capture(lambda: self._work(inputs)))
            if self._finish is not None:
                self._finish()
            return captured
        except Exception as error:  # a driver's, the compiler's or Triton's
            # After a step that fails, ending its capture fails, too.
            raise _refusal(error.__context__ or error) from error
        finally:
            self.is_capturing = False


class _Captured:
    def __init__(self, inputs: list[Tensor], replay: Callable[[], object], sums: Tensor) -> None:
        self._inputs = inputs
        self._replay = replay
        self._sums = sums

    def take(self, columns: Sequence[Tensor]) -> Tensor:
        """Enqueue the step on other columns."""
        for kept, column in zip(self._inputs, columns, strict=True):
            kept.copy_(column)
        self._replay()
        return self._sums.clone()


def _refusal(error: BaseException) -> BaseException:
    """Return the error of a capture; a lack of memory stays one."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return BackendError(
        f"a step cannot be captured as a CUDA graph ({error}); use --set cuda_graph=off"
    )
