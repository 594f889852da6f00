"""Scores of images from a runtime's logits, and how fast an evaluation was."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypedDict

import numpy as np

from lockstep.backends.reference import functions
from lockstep.data import Batch
from lockstep.models.latency import latency_ms
from lockstep.models.metrics import Scores


def compute_scores(
    predict: Callable[[np.ndarray], np.ndarray],
    batches: Iterable[Batch],
    *,
    flips: bool = False,
    with_logits: bool = False,
) -> Scores:
    """Return the scores of every image that is not padding, from the logits that `predict` returns,
    in float64, and these if they are wanted. With `flips`, they are the mean of those of image and
    mirror image."""
    rows = []
    for batch in batches:
        counted = batch.labels >= 0
        logits = predict(batch.pixels).astype(np.float64)
        if flips:
            mirrored = np.ascontiguousarray(batch.pixels[:, :, ::-1])
            logits = (logits + predict(mirrored)) / 2
        scores = functions.score(logits[counted], batch.labels[counted])
        rows.append(np.hstack([scores, logits[counted]]) if with_logits else scores)
    return Scores.unpack_table(np.concatenate(rows or [np.zeros((0, 5))]))


class Speed(TypedDict):
    """How fast an evaluation was, without its first batch if there are others."""

    images_per_sec: float
    """Images over wall time, with decoding."""
    batch_images: int
    latency_ms: dict[str, float] | None
    """Time from a batch to its results, without decoding: mean and percentiles. None on GPUs, which
    return before they are done."""


class Pace:
    """Measures a runtime that takes batches one after another: each from when it gets the batch to
    when it asks for more."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float, int]] = []

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all batches."""
        for batch in batches:
            began = time.perf_counter()
            yield batch
            self._marks.append((began, time.perf_counter(), int((batch.labels >= 0).sum())))

    def describe_speed(self, *, batch_images: int, on_gpu: bool) -> Speed:
        """Return the figures of the batches so far. There must be at least one."""
        began, first_done, _ = self._marks[0]
        counted = self._marks
        if len(counted) > 1:
            began = first_done
            counted = counted[1:]
        seconds = counted[-1][1] - began
        latency = None
        if not on_gpu:
            latency = latency_ms([done - begun for begun, done, _ in counted])
        return {
            "images_per_sec": sum(images for _, _, images in counted) / seconds,
            "batch_images": batch_images,
            "latency_ms": latency,
        }
