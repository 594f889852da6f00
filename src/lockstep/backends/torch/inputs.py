"""Batches on their way to the device.

On a GPU, another thread copies a batch into pinned memory and starts its upload while the step
before it is enqueued. All memory is kept. Two uploaded batches are on the GPU, however many steps
are enqueued: a step reads one while the other is filled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lockstep.backends.shared.batch_columns import list_columns
from lockstep.data import Batch, LentImages

Arrays = Sequence[np.ndarray]
T = TypeVar("T")

PINNED = 4
"""Batches that can be in pinned memory. With 256 images of 224 px that is 268 MB, since PyTorch
takes powers of two. The host can thus be five steps ahead of a GPU."""


class Inputs:
    """Yields batches with their columns on the device; keeps images that are held there, and
    borrows those that are lent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = CudaStreams(device) if device.type == "cuda" else None
        self._uploads = Uploads(self._streams) if self._streams is not None else None
        # A separate stream: uploads wait for steps that the copy of a lent batch need not wait for.
        self._borrower = Borrower(
            device, torch.cuda.Stream(device) if self._streams is not None else None
        )
        self._held: tuple[np.ndarray, Tensor] | None = None

    def close(self) -> None:
        """End the thread that uploads."""
        if self._uploads is not None:
            self._uploads.end()

    def upload(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Tensor]]]:
        """Yield each batch with its columns: images, labels, with dropout the kept features, with
        stochastic depth the kept blocks, if images are mixed coefficients and partners, and with
        CutMix target coefficients and boxes.

        Columns are valid until the next batch is asked for: work that reads them must be enqueued
        before. On a GPU the batch that follows is taken from `batches` before one is yielded.
        """
        for batch, uploaded in self._upload_columns(batches):
            if _uploads_images(batch):
                yield batch, uploaded
            elif isinstance(batch.images, np.ndarray):
                yield batch, [self._hold(batch.images), *uploaded]
            else:
                yield batch, [self._borrower.copy(batch.images), *uploaded]

    def _upload_columns(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Tensor]]]:
        if self._uploads is not None:
            return self._uploads.ahead((batch, _arrays(batch)) for batch in batches)
        return ((batch, [_tensor(array) for array in _arrays(batch)]) for batch in batches)

    def _hold(self, images: np.ndarray) -> Tensor:
        if self._held is None or self._held[0] is not images:
            self._held = images, self.put(images)
        return self._held[1]

    def put(self, images: np.ndarray) -> Tensor:
        """Return images on the device, copied on the current stream."""
        tensor = _tensor(images)
        if self._streams is None:
            return tensor
        # PyTorch keeps pinned memory, and uses it again.
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _uploads_images(batch: Batch) -> bool:
    return isinstance(batch.images, np.ndarray) and not batch.is_held


def _arrays(batch: Batch) -> list[np.ndarray]:
    """Return the columns of a batch that are new to the device."""
    arrays = [batch.pixels] if _uploads_images(batch) else []
    return [*arrays, batch.labels, *list_columns(batch)]


def _tensor(array: np.ndarray) -> Tensor:
    # PyTorch refuses strides below 0, and warns of memory that is read only.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class Streams(Protocol):
    """The stream of uploads and the stream of steps, as `Uploads` uses them. Events are those of
    CUDA."""

    def begin_thread(self) -> None:
        """Prepare the thread that uploads."""

    def event(self) -> Any:
        """Return an event that counts as over until it is recorded."""

    def make_pinned(self, like: Tensor) -> Tensor:
        """Return a tensor in pinned memory."""

    def make_column(self, like: Tensor) -> Tensor:
        """Return a tensor on the device."""

    def upload(
        self, pinned: Sequence[Tensor], columns: Sequence[Tensor], *, after: Any, done: Any
    ) -> None:
        """Enqueue copies to the device, once `after` is over. `done` is over when they are."""

    def begin_step(self, after: Any) -> None:
        """Let the steps that are enqueued from now on wait for an event."""

    def end_step(self, done: Any) -> None:
        """Record an event that is over when the steps are that were enqueued until now."""


class CudaStreams:
    """Streams of a GPU. Steps are enqueued on the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploads = torch.cuda.Stream(device)

    def begin_thread(self) -> None:
        """Make the rank's GPU the thread's. A new thread has GPU 0, where each rank would otherwise
        take memory."""
        torch.cuda.set_device(self._device)

    def event(self) -> torch.cuda.Event:
        """Return an event for which a thread waits asleep: its core is left to decode images."""
        return torch.cuda.Event(blocking=True)

    def make_pinned(self, like: Tensor) -> Tensor:
        """Return memory on the host."""
        return torch.empty_like(like, pin_memory=True)

    def make_column(self, like: Tensor) -> Tensor:
        """Return memory on the GPU."""
        with torch.cuda.stream(self._uploads):
            return torch.empty_like(like, device=self._device)

    def upload(
        self,
        pinned: Sequence[Tensor],
        columns: Sequence[Tensor],
        *,
        after: torch.cuda.Event,
        done: torch.cuda.Event,
    ) -> None:
        """Enqueue copies on the stream of uploads."""
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(after)
            for source, column in zip(pinned, columns, strict=True):
                column.copy_(source, non_blocking=True)
            done.record(self._uploads)

    def begin_step(self, after: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(after)

    def end_step(self, done: torch.cuda.Event) -> None:
        """Record an event on the current stream."""
        done.record(torch.cuda.current_stream(self._device))


class Uploads:
    """Copies columns to the device, one batch ahead of the step that is enqueued.

    The host waits for the device only if `PINNED` batches wait for their upload.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pinned = deque(_Memory(streams.make_pinned, streams.event()) for _ in range(PINNED))
        self._columns = deque(_Memory(streams.make_column, streams.event()) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, "lockstep-uploads", initializer=streams.begin_thread)

    def end(self) -> None:
        """Let the thread end. It is not waited for: it may wait for a GPU that waits for a rank
        that has died."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def ahead(self, batches: Iterable[tuple[T, Arrays]]) -> Iterator[tuple[T, list[Tensor]]]:
        """Yield what stands next to each batch's columns, with these columns on the device, as
        `Inputs.upload` does."""
        waiting: tuple[T, Future[tuple[Any, _Memory]]] | None = None
        for beside, arrays in batches:
            # Batch i goes where batch i - 2 was. Step i - 2 is enqueued, and its end is recorded.
            upload = self._thread.submit(self._upload, [_tensor(array) for array in arrays])
            if waiting is not None:
                yield from self._lend_for_step(*waiting)
            waiting = beside, upload
        if waiting is not None:
            yield from self._lend_for_step(*waiting)

    def _upload(self, arrays: Sequence[Tensor]) -> tuple[Any, "_Memory"]:
        """Start an upload; return the event that ends it, which also frees the pinned memory, and
        the columns."""
        pinned = self._pinned[0]
        columns = self._columns[0]
        self._pinned.rotate(-1)
        self._columns.rotate(-1)
        pinned.free.synchronize()
        pinned.fit(arrays)
        columns.fit(arrays)
        for array, copy in zip(arrays, pinned.tensors, strict=True):
            # On this thread alone: the others' cores decode images.
            np.copyto(copy.numpy(), array.numpy())
        self._streams.upload(pinned.tensors, columns.tensors, after=columns.free, done=pinned.free)
        return pinned.free, columns

    def _lend_for_step(
        self, beside: T, upload: "Future[tuple[Any, _Memory]]"
    ) -> Iterator[tuple[T, list[Tensor]]]:
        uploaded, columns = upload.result()
        self._streams.begin_step(uploaded)
        try:
            yield beside, list(columns.tensors)
        finally:
            self._streams.end_step(columns.free)


class _Memory:
    """Memory for the columns of a batch, on the host or on the device."""

    def __init__(self, make: Callable[[Tensor], Tensor], free: Any) -> None:
        self._make = make
        self.free = free
        """`free` is over when the last copy or step that reads the memory is."""
        self.tensors: list[Tensor] = []

    def fit(self, like: Sequence[Tensor]) -> None:
        """Replace the memory if it is not that of columns with these shapes and types."""
        if [(tensor.shape, tensor.dtype) for tensor in like] != [
            (tensor.shape, tensor.dtype) for tensor in self.tensors
        ]:
            self.free.synchronize()
            self.tensors = []  # first, so that the new memory can be where the old was
            self.tensors = [self._make(tensor) for tensor in like]


_CPU = 1
_CUDA = 2
"""DLPack's types of these devices."""


class Borrower:
    """Copies lent images to an engine's device. From a GPU to the same GPU, the host does not wait
    for the copy."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._lent: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        """Images that are being copied, with what is done afterwards. They keep the loader's
        memory."""

    def copy(self, images: LentImages) -> Tensor:
        """Return a copy of images on the device, for work that is enqueued on this stream."""
        if images.__dlpack_device__()[0] != (_CPU if self._stream is None else _CUDA):
            return torch.from_numpy(np.array(images)).to(self._device)
        if self._stream is None:
            return from_dlpack(images).clone()
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        with torch.cuda.stream(self._stream):
            lent = from_dlpack(images)  # this stream then waits for the loader's
            copy = lent.clone()
            self._lent.append((self._stream.record_event(), lent))
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        copy.record_stream(current)  # its memory is not used again before this stream has read it
        return copy
