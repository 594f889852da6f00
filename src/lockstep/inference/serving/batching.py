"""Dynamic batching: one thread owns the runtime, and computes the images of several requests
together."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.inference.engines import ADVICE
from lockstep.inference.serving.limits import Limits
from lockstep.inference.serving.model import Served
from lockstep.system.errors import DivergedError

_LONGEST_RETRY_SEC = 60
_NEW = 0.2
"""The weight of the newest batch in the rate that `retry_after_sec` is estimated from."""


class Full(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class Computed:
    """The results of a request."""

    logits: np.ndarray
    """float32 [N, logits]."""
    heat: np.ndarray | None
    """Grad-CAM, float32 [N, height, width], if the request wants it."""
    waited_sec: float
    """From the request's arrival in the queue to the start of its batch."""
    computed_sec: float
    batch_images: int
    """Images in the batch."""


@dataclass
class _Job:
    images: np.ndarray
    explain: bool
    result: "Future[Computed]" = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)


Watcher = Callable[[int, float], None]
"""Called by the worker with the images of every batch and the seconds that it took."""


class Batcher:
    """A bounded queue of images in front of a runtime.

    Requests announce themselves with `expect`. When their bodies have come, `Ticket.admit` takes
    places in the queue, or refuses them if it is full, and `Ticket.submit` gives their images. The
    worker's thread calls `run`, which computes until `close` is called and the queue is empty.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.watcher: Watcher | None = None
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self.waiting = 0
        """Images in the queue."""
        self.admitted = 0
        """Images that are being decoded, waited for or computed."""
        self.coming = 0
        """Requests whose images are being received or decoded."""
        self._closed = False
        self._rate = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no more images can be admitted."""
        return self.admitted >= self._limits.max_queue

    @contextmanager
    def expect(self) -> Iterator["Ticket"]:
        """Yield the ticket of a request whose body is being received. It has no places in the queue
        yet; those that it takes are given back when the block ends."""
        ticket = Ticket(self)
        with self._changed:
            self.coming += 1
        try:
            yield ticket
        finally:
            with self._changed:
                self.admitted -= ticket.images
                if not ticket.is_submitted:
                    self.coming -= 1
                    self._changed.notify_all()

    def retry_after_sec(self) -> int:
        """Return the seconds after which the images in the server will probably be computed; at
        least 1."""
        seconds = self.admitted / self._rate if self._rate else 1.0
        return min(max(math.ceil(seconds), 1), _LONGEST_RETRY_SEC)

    def close(self) -> None:
        """Let `run` return when the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self, model: Served) -> None:
        """Compute batches until the queue is closed and empty, in the thread that opened the model.
        An error of the runtime goes to the requests of its batch."""
        while (jobs := self._next()) is not None:
            if jobs:
                self._compute(model, jobs)

    def _enter(self, images: int) -> None:
        with self._changed:
            if self.admitted + images > self._limits.max_queue:
                raise Full
            self.admitted += images

    def _put(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self.waiting += len(job.images)
            self.coming -= 1
            self._changed.notify_all()

    def _next(self) -> list[_Job] | None:
        """Wait for images; return the requests of a batch, which were not cancelled, or None if
        there will be no more."""
        most = self._limits.max_batch
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            until = time.monotonic() + self._limits.max_wait_ms / 1000
            while (
                self.waiting < most and self.coming > 0 and (left := until - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            jobs = []
            images = 0
            while self._jobs and images + len(self._jobs[0].images) <= most:
                job = self._jobs.popleft()
                self.waiting -= len(job.images)
                if job.result.set_running_or_notify_cancel():
                    jobs.append(job)
                    images += len(job.images)
            return jobs

    def _compute(self, model: Served, jobs: Sequence[_Job]) -> None:
        began = time.perf_counter()
        images = jobs[0].images if len(jobs) == 1 else np.concatenate([job.images for job in jobs])
        try:
            logits = model.predict(images)
        except Exception as error:  # of a library: this batch fails, and the server continues
            for job in jobs:
                job.result.set_exception(error)
            return
        seconds = time.perf_counter() - began
        rate = len(images) / max(seconds, 1e-9)
        if self._rate:
            rate = (1 - _NEW) * self._rate + _NEW * rate
        self._rate = rate
        if self.watcher is not None:
            self.watcher(len(images), seconds)
        answers = []
        start = 0
        for job in jobs:
            stop = start + len(job.images)
            waited = began - job.since
            computed = Computed(logits[start:stop], None, waited, seconds, len(images))
            answers.append((job, computed))
            start = stop
        # Explanations take longer, so they are last.
        for job, computed in sorted(answers, key=lambda answer: answer[0].explain):
            _answer(model, job, computed)


def _answer(model: Served, job: _Job, computed: Computed) -> None:
    """Give a request its results, or the reason why there are none."""
    try:
        if not np.isfinite(computed.logits).all():
            raise DivergedError(f"the logits of an image are not finite numbers. {ADVICE}")
        if job.explain:
            began = time.perf_counter()
            heat = model.explain(job.images, computed.logits.argmax(axis=1))
            seconds = computed.computed_sec + time.perf_counter() - began
            computed = replace(computed, heat=heat, computed_sec=seconds)
    except Exception as error:
        job.result.set_exception(error)
    else:
        job.result.set_result(computed)


class Ticket:
    """The right of a request to have images computed."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.images = 0
        """Its places in the queue."""
        self.is_submitted = False

    def admit(self, images: int) -> None:
        """Take places for a request of this many images, once. Raises `Full`."""
        self._batcher._enter(images)
        self.images = images

    def submit(self, images: np.ndarray, *, explain: bool = False) -> "Future[Computed]":
        """Put images, uint8 [N, size, size, 3], into the queue, once. N is the number of the
        ticket's places.

        A future that is cancelled before its batch begins is not computed.
        """
        assert len(images) == self.images
        job = _Job(images, explain)
        self._batcher._put(job)
        self.is_submitted = True
        return job.result
