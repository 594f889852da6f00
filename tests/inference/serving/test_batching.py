"""The queue in front of a runtime: batches, bounds, errors, and the end; bodies that give way. The
runtime is a sum over pixels."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import Message

from lockstep.inference.serving.batching import Batcher, Computed, Full
from lockstep.inference.serving.bodies import Bodies, Refused
from lockstep.inference.serving.limits import Limits
from lockstep.system.errors import DivergedError, UserError
from tests.processes import wait_until

SIDE = 2
PATIENCE_SEC = 60
"""How long is waited for what is expected to happen soon."""


class Sums:
    """Logits are the sum of an image's pixels, and that times 2. It computes only while `gate` is
    set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.batches = list[int]()
        self.gate.set()
        self.error: Exception | None = None

    def predict(self, images: np.ndarray) -> np.ndarray:
        self.began.set()
        assert self.gate.wait(PATIENCE_SEC)
        self.batches.append(len(images))
        if self.error is not None:
            raise self.error
        sums = images.reshape(len(images), -1).sum(axis=1, dtype=np.float32)
        sums[sums == 255 * SIDE * SIDE * 3] = np.nan
        return np.stack([sums, 2 * sums], axis=1)

    def explain(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        return np.broadcast_to(classes[:, None, None].astype(np.float32), (len(images), 1, 1))


Start = Callable[..., tuple[Batcher, Sums]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a batcher with these limits."""
    started: list[tuple[Batcher, Sums, threading.Thread]] = []

    def begin(**limits: float) -> tuple[Batcher, Sums]:
        # type: ignore[arg-type]
        batcher = Batcher(Limits(**limits))
        sums = Sums()
        thread = threading.Thread(target=batcher.run, args=(sums,))
        thread.start()
        started.append((batcher, sums, thread))
        return batcher, sums

    yield begin
    for batcher, sums, thread in started:
        sums.gate.set()
        batcher.close()
        thread.join(PATIENCE_SEC)
        assert not thread.is_alive()


def images(*values: int) -> np.ndarray:
    return np.stack([np.full((SIDE, SIDE, 3), value, np.uint8) for value in values])


def put(batcher: Batcher, *values: int, explain: bool = False) -> "Future[Computed]":
    with batcher.expect() as ticket:
        ticket.admit(len(values))
        return ticket.submit(images(*values), explain=explain)


def block_runtime(batcher: Batcher, sums: Sums) -> "Future[Computed]":
    """Put an image that the runtime computes until `gate` is set."""
    sums.gate.clear()
    sums.began.clear()
    result = put(batcher, 9)
    assert sums.began.wait(PATIENCE_SEC)
    return result


def test_requests_during_a_batch_are_the_next_batch(start: Start) -> None:
    batcher, sums = start(max_batch=8)
    first = block_runtime(batcher, sums)
    others = [put(batcher, 1), put(batcher, 2, 3), put(batcher, 4)]
    sums.gate.set()
    assert [future.result(PATIENCE_SEC).logits[:, 0].tolist() for future in (first, *others)] == [
        [108],
        [12],
        [24, 36],
        [48],
    ]
    assert sums.batches == [1, 4]
    assert {future.result().batch_images for future in others} == {4}


def test_batches_are_at_most_as_large_as_allowed_and_no_request_is_divided(start: Start) -> None:
    batcher, sums = start(max_batch=4)
    block_runtime(batcher, sums)
    futures = [put(batcher, *range(count)) for count in (3, 2, 2, 1, 4)]
    sums.gate.set()
    assert [len(future.result(PATIENCE_SEC).logits) for future in futures] == [3, 2, 2, 1, 4]
    assert sums.batches == [1, 3, 4, 1, 4]


def test_a_batch_waits_for_images_in_progress_and_only_for_them(start: Start) -> None:
    batcher, sums = start(max_batch=8, max_wait_ms=10_000 * PATIENCE_SEC)
    put(batcher, 1).result(PATIENCE_SEC)  # nothing else is in progress
    with batcher.expect() as late:
        late.admit(1)
        early = put(batcher, 1)
        time.sleep(0.05)
        assert not early.done()
        later = late.submit(images(2))
        assert (
            early.result(PATIENCE_SEC).batch_images == later.result(PATIENCE_SEC).batch_images == 2
        )
    with batcher.expect():  # its image cannot be read
        waiting = put(batcher, 3)
    assert waiting.result(PATIENCE_SEC).batch_images == 1
    assert sums.batches == [1, 2, 1]


def test_a_batch_waits_no_longer_than_allowed(start: Start) -> None:
    batcher, _ = start(max_batch=8, max_wait_ms=1)
    with batcher.expect():
        assert put(batcher, 1).result(PATIENCE_SEC).batch_images == 1


def test_the_queue_is_bounded_and_its_places_come_back(start: Start) -> None:
    batcher, _ = start(max_batch=2, max_queue=3)
    with batcher.expect() as first, batcher.expect() as second, batcher.expect() as third:
        assert batcher.admitted == 0  # what is being received takes no place
        first.admit(1)
        with pytest.raises(Full):
            second.admit(3)
        second.admit(2)
        with pytest.raises(Full):
            third.admit(1)
        assert batcher.is_full
        assert batcher.admitted == 3
        assert batcher.retry_after_sec() >= 1
    assert batcher.admitted == 0
    assert put(batcher, 1, 2).result(PATIENCE_SEC).batch_images == 2


def test_a_cancelled_request_is_not_computed(start: Start) -> None:
    batcher, sums = start()
    block_runtime(batcher, sums)
    left = put(batcher, 1)
    stays = put(batcher, 2)
    assert left.cancel()
    sums.gate.set()
    assert stays.result(PATIENCE_SEC).logits[0, 0] == 24
    assert sums.batches == [1, 1]
    assert batcher.waiting == 0


def test_an_error_reaches_its_own_requests_alone(start: Start) -> None:
    batcher, sums = start()
    sums.error = MemoryError("too much")
    with pytest.raises(MemoryError, match="too much"):
        put(batcher, 1).result(PATIENCE_SEC)
    sums.error = None
    assert put(batcher, 1).result(PATIENCE_SEC).logits[0, 0] == 12


def test_a_result_that_is_not_finite_is_an_error_of_its_request_alone(start: Start) -> None:
    batcher, sums = start()
    block_runtime(batcher, sums)
    bad = put(batcher, 255)
    good = put(batcher, 1)
    sums.gate.set()
    with pytest.raises(DivergedError, match="not finite"):
        bad.result(PATIENCE_SEC)
    assert good.result(PATIENCE_SEC).logits[0, 0] == 12


def test_an_explanation_is_of_the_likeliest_class(start: Start) -> None:
    batcher, _ = start()
    heat = put(batcher, 1, explain=True).result(PATIENCE_SEC).heat
    assert heat is not None
    assert heat.tolist() == [[[1.0]]]
    assert put(batcher, 1).result(PATIENCE_SEC).heat is None


def test_what_is_queued_is_computed_before_the_end() -> None:
    batcher = Batcher(Limits(max_batch=2))
    sums = Sums()
    futures = [put(batcher, value) for value in range(5)]
    batcher.close()
    thread = threading.Thread(target=batcher.run, args=(sums,))
    thread.start()
    thread.join(PATIENCE_SEC)
    assert not thread.is_alive()
    assert [future.result(0).logits[0, 0] for future in futures] == [0, 12, 24, 36, 48]


def test_many_threads_get_their_own_results(start: Start) -> None:
    batcher, sums = start(max_batch=16)
    wrong: list[int] = []

    def client(value: int) -> None:
        wrong.extend(
            value
            for _ in range(50)
            if put(batcher, value).result(PATIENCE_SEC).logits[0, 0] != 12 * value
        )

    threads = [threading.Thread(target=client, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SEC)
    assert wrong == []
    assert sum(sums.batches) == 800
    wait_until(lambda: batcher.admitted == 0)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch": 0},
        {"max_wait_ms": -1},
        {"max_wait_ms": float("nan")},
        {"max_queue": 8},
        {"timeout_sec": 0},
        {"max_body_mb": 10**10},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_body_that_gives_way_as_its_last_bytes_come_is_refused() -> None:
    async def read() -> None:
        bodies = Bodies(Limits())
        with bodies.hold() as reading:

            async def receive() -> Message:
                reading.drop()
                return {"type": "http.request", "body": b"the last bytes", "more_body": False}

            await reading.read(Request({"type": "http", "headers": []}, receive))

    with pytest.raises(Refused, match="stalled while others arrived") as refused:
        asyncio.run(read())
    assert refused.value.status == 408
