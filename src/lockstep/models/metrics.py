"""Sums and counts. A mean is computed only where it is printed, so that any number of ranks and
batches can be added up."""

import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from lockstep.models.class_metrics import ClassCounts
from lockstep.system.event_log import Summary


def is_top5_informative(classes: int) -> bool:
    """Return whether top-5 is informative for this many classes. With five or fewer, nearly every
    prediction is a hit."""
    return classes > 5


@dataclass(frozen=True)
class Counts:
    """Sums over images: loss, top-1 and top-5 hits, and number of images."""

    loss_sum: float = 0.0
    top1: int = 0
    top5: int = 0
    images: int = 0

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            self.loss_sum + other.loss_sum,
            self.top1 + other.top1,
            self.top5 + other.top5,
            self.images + other.images,
        )

    def summary(self) -> Summary:
        """Return mean loss, top-1 and top-5 in percent, and the number of images.

        >>> Counts(loss_sum=3.0, top1=1, top5=2, images=2).summary()
        {'loss': 1.5, 'top1_percent': 50.0, 'top5_percent': 100.0, 'images': 2}
        """
        return {
            "loss": self.loss_sum / self.images,
            "top1_percent": 100 * self.top1 / self.images,
            "top5_percent": 100 * self.top5 / self.images,
            "images": self.images,
        }


def format_loss(loss: float | None) -> str:
    """Return a loss as it is shown, or "not finite". Files have null for a loss that is not finite.

    >>> format_loss(0.34567), format_loss(None), format_loss(float("inf"))
    ('0.3457', 'not finite', 'not finite')
    """
    return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else "not finite"


@dataclass(frozen=True)
class Scores:
    """The results of an evaluation for each image, as arrays of [images]."""

    losses: np.ndarray
    """float32: cross-entropy with the label, without label smoothing."""
    ranks: np.ndarray
    """int32: number of classes that the model ranks above the label (0: the prediction is right).
    """
    predictions: np.ndarray
    """int32: the predicted class."""
    labels: np.ndarray
    """int32: the class of the image in the data set."""
    confidences: np.ndarray
    """float32: the probability (softmax of the logits) of the predicted class."""

    @classmethod
    def unpack_table(cls, table: np.ndarray) -> "Scores":
        """Return the scores in a table of [images, 5], with the columns in the order above. Rows
        with a label below 0 are padding and are left out.

        >>> Scores.unpack_table(np.array([[0.5, 0, 2, 2, 0.6], [9.0, 1, 3, -1, 0.9]])).labels
        array([2], dtype=int32)
        """
        losses, ranks, predictions, labels, confidences = table[table[:, 3] >= 0].T
        return cls(
            losses.astype(np.float32),
            ranks.astype(np.int32),
            predictions.astype(np.int32),
            labels.astype(np.int32),
            confidences.astype(np.float32),
        )

    def sort_by_sample(self, samples: np.ndarray) -> "Scores":
        """Return the scores in the order of the index. `samples` is the sample of each row: int64
        [images]."""
        order = np.argsort(samples)
        return Scores(*(getattr(self, field.name)[order] for field in fields(self)))

    def counts(self) -> Counts:
        """Return the sums over all images. They do not depend on the order of the images."""
        return Counts(
            loss_sum=float(np.sort(self.losses.astype(np.float64)).sum()),
            top1=int((self.ranks < 1).sum()),
            top5=int((self.ranks < 5).sum()),
            images=len(self.ranks),
        )

    def per_class(self, classes: int) -> ClassCounts:
        """Return the numbers of images, hits and predictions of every class.

        A model can predict classes beyond those of the images; they are not counted.
        """
        return {
            "images": np.bincount(self.labels, minlength=classes).tolist(),
            "top1": np.bincount(self.labels[self.ranks < 1], minlength=classes).tolist(),
            "top5": np.bincount(self.labels[self.ranks < 5], minlength=classes).tolist(),
            "predicted": np.bincount(self.predictions, minlength=classes)[:classes].tolist(),
        }


WARMUP_STEPS = 10
"""Throughput ignores this many steps at the start of a process."""


class Throughput:
    """Images per second of training without its first steps, which compile, allocate and fill
    caches."""

    def __init__(self, warmup_steps: int = WARMUP_STEPS) -> None:
        self._warmup_left = warmup_steps
        self._images = 0
        self._seconds = 0.0
        self._waited = 0.0

    def add(self, steps: int, images: int, seconds: float, waited: float) -> None:
        """Add an interval: its wall time, and the part of it spent waiting for data, in seconds."""
        if self._warmup_left > 0:
            self._warmup_left -= steps
            return
        self._images += images
        self._seconds += seconds
        self._waited += waited

    @property
    def images_per_sec(self) -> float | None:
        """Images per second of wall time; None if all steps were warm-up."""
        return self._images / self._seconds if self._images else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the wall time spent waiting for data; None if all steps were warm-up."""
        return self._waited / self._seconds if self._images else None
