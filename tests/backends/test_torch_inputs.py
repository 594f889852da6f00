"""Uploads to a GPU, on streams that are threads: what is enqueued runs later, as on a GPU."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.backends import LoadedBackend
from lockstep.backends.torch.inputs import PINNED, Uploads
from lockstep.recipes import Execution, Recipe
from tests.backends.cases import all_bits
from tests.backends.conftest import Start, make_backend_fixture, starter
from tests.backends.drawing import draw_batch, draw_batches, draw_state

Built = Callable[..., "Device"]


backend = make_backend_fixture("torch")


class Event:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.over.set()

    def record(self, stream: ThreadPoolExecutor) -> None:
        self.over = threading.Event()
        stream.submit(self.over.set)

    def synchronize(self) -> None:
        assert self.over.wait(60)


class Device:
    """Implements `lockstep.backends.torch.inputs.Streams`. Work takes some milliseconds."""

    def __init__(self, upload_ms: float = 0, step_ms: float = 0) -> None:
        self._upload_sec = upload_ms / 1000
        self._step_sec = step_ms / 1000
        self.uploads = ThreadPoolExecutor(1)
        self.steps = ThreadPoolExecutor(1)
        self.made: list[str] = []
        """"pinned" or "column" for every tensor that was made."""
        self.threads: set[str] = set()
        """Names of threads that have begun to upload."""
        self.read: list[list[Tensor]] = []
        """What the steps that ran found in their columns."""

    event = Event

    def begin_thread(self) -> None:
        self.threads.add(threading.current_thread().name.partition("_")[0])

    def make_pinned(self, like: Tensor) -> Tensor:
        return self._make("pinned", like)

    def make_column(self, like: Tensor) -> Tensor:
        return self._make("column", like)

    def _make(self, what: str, like: Tensor) -> Tensor:
        self.made.append(what)
        assert threading.current_thread().name.partition("_")[0] in self.threads
        return torch.full_like(like, -1)

    def upload(
        self, pinned: Sequence[Tensor], columns: Sequence[Tensor], *, after: Event, done: Event
    ) -> None:
        before = after.over

        def copy() -> None:
            assert before.wait(60)
            time.sleep(self._upload_sec)
            for source, column in zip(pinned, columns, strict=True):
                column.copy_(source)

        self.uploads.submit(copy)
        done.record(self.uploads)

    def begin_step(self, after: Event) -> None:
        self.steps.submit(after.over.wait, 60)

    def end_step(self, done: Event) -> None:
        done.record(self.steps)

    def step(self, columns: Sequence[Tensor]) -> None:
        """Enqueue a step that notes what its columns hold."""

        def read() -> None:
            time.sleep(self._step_sec)
            self.read.append([column.clone() for column in columns])

        self.steps.submit(read)

    def close(self) -> None:
        self.uploads.shutdown()
        self.steps.shutdown()


@pytest.fixture
def build() -> Iterator[Built]:
    built: list[Device] = []

    def build(**how: float) -> Device:
        built.append(Device(**how))
        return built[-1]

    yield build
    for device in built:
        device.close()


def make_batch(number: int, length: int = 1000) -> list[np.ndarray]:
    return [np.full((length, 2), number % 256, np.uint8), np.full(length, number, np.int64)]


def enqueue(uploads: Uploads, device: Device, batches: Iterable[list[np.ndarray]]) -> None:
    for _, columns in uploads.ahead((None, batch) for batch in batches):
        device.step(columns)


def train(device: Device, batches: Sequence[list[np.ndarray]]) -> None:
    """Take a step on every batch, and check what each one found when it ran."""
    uploads = Uploads(device)
    enqueue(uploads, device, batches)
    uploads.end()
    check(device, batches)


def check(device: Device, batches: Sequence[list[np.ndarray]]) -> None:
    device.close()
    for columns, batch in zip(device.read, batches, strict=True):
        for column, array in zip(columns, batch, strict=True):
            assert np.array_equal(column.numpy(), array)


@pytest.mark.parametrize("slow", ["upload_ms", "step_ms"])
def test_steps_read_their_own_batches_in_memory_that_is_kept(build: Built, slow: str) -> None:
    device = build(**{slow: 3})
    train(device, [make_batch(number) for number in range(3 * PINNED)])
    assert sorted(device.made) == ["column"] * 4 + ["pinned"] * 2 * PINNED
    assert device.threads == {"lockstep-uploads"}


def test_batches_of_changing_sizes_get_other_memory(build: Built) -> None:
    train(build(step_ms=3), [make_batch(number, 1000 + number % 3) for number in range(3 * PINNED)])


def test_the_host_goes_ahead_of_the_device_by_some_steps(build: Built) -> None:
    device = build()
    go = threading.Event()
    device.steps.submit(go.wait, 60)
    uploads = Uploads(device)
    enqueue(uploads, device, [make_batch(number) for number in range(PINNED + 1)])
    assert device.read == []
    go.set()
    uploads.end()


def test_after_a_batch_that_cannot_be_read_others_are_uploaded(build: Built) -> None:
    def broken() -> Iterator[list[np.ndarray]]:
        yield make_batch(0)
        yield make_batch(1)
        raise ValueError("2.jpg cannot be read")

    device = build(step_ms=3)
    uploads = Uploads(device)
    with pytest.raises(ValueError, match=r"2\.jpg cannot be read"):
        enqueue(uploads, device, broken())
    more = [make_batch(number) for number in range(2, 9)]
    enqueue(uploads, device, more)
    uploads.end()
    check(device, [make_batch(0), *more])


class AtOnce(Device):
    """A device whose steps are computed when they are enqueued, as on a CPU; uploads take their
    time."""

    def begin_step(self, after: Event) -> None:
        after.synchronize()

    def end_step(self, done: Event) -> None:
        assert done.over.is_set()


def test_uploading_engines_have_the_same_bits(backend: LoadedBackend, tiny_recipe: Recipe) -> None:
    world = backend.world(Execution(device="cpu"))
    with ExitStack() as stack:
        check_uploading(starter(backend, world, stack), tiny_recipe)


def check_uploading(start: Start, recipe: Recipe) -> None:
    device = AtOnce(upload_ms=1)
    recipe = recipe.replace(dropout=0.4, stochastic_depth=0.6)
    plain = start(recipe, new=True, device="cpu")
    uploading = start(recipe, new=True, device="cpu")
    engine: Any = uploading
    engine._inputs._uploads = Uploads(device)
    batches = [
        *draw_batches(recipe, 5, mixup="sample"),
        draw_batch(recipe),
        *draw_batches(recipe, 2, mixup="cut"),
    ]
    batches += [replace(batch, is_held=True) for batch in batches[:1] * 3]
    results = []
    for one in (plain, uploading):
        one.write(draw_state(recipe))
        handle = one.train(batches, 0)
        scores = one.evaluate(draw_batches(recipe, 3))
        results.append(
            (one.fetch(handle).losses.tobytes(), all_bits(one.read()), scores.losses.tobytes())
        )
    assert results[0] == results[1]
    assert set(device.made) == {"pinned", "column"}
    device.close()
