"""Results of evaluations: sums, scores of single images, and `METRICS`, the table of the figures
that follow from the scores.

A mean is computed only where it is printed, so that any number of ranks and batches can be added
up.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from operator import add
from typing import Any, Self

import numpy as np

from lockstep.models.accuracy_interval import format_accuracy
from lockstep.models.class_metrics import ClassCounts, summarise_classes
from lockstep.system.event_log import Summary
from lockstep.system.strict_json import is_figure
from lockstep.system.text import format_count


@dataclass(frozen=True)
class Counts:
    """Sums over images: loss, top-1 and top-5 hits, and number of images."""

    loss_sum: float = 0.0
    top1: int = 0
    top5: int = 0
    images: int = 0

    def __add__(self, other: Self) -> "Counts":
        return Counts(*map(add, astuple(self), astuple(other)))

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
    logits: np.ndarray | None = None
    """float32 [images, outputs], if the evaluation asked for them."""

    @classmethod
    def unpack_table(cls, table: np.ndarray) -> "Scores":
        """Return the scores in a table of [images, 5], with the columns in the order above;
        further columns are logits. Rows with a label below 0 are padding and are left out.

        >>> Scores.unpack_table(np.array([[0.5, 0, 2, 2, 0.6], [9.0, 1, 3, -1, 0.9]])).labels
        array([2], dtype=int32)
        """
        kinds = (np.float32, np.int32, np.int32, np.int32, np.float32)
        table = table[table[:, 3] >= 0]
        logits = table[:, 5:].astype(np.float32) if table.shape[1] > 5 else None
        return replace(cls(*map(np.ndarray.astype, table.T, kinds)), logits=logits)

    def sort_by_sample(self, samples: np.ndarray) -> "Scores":
        """Return the scores in the order of the index. `samples` is the sample of each row: int64
        [images]."""
        order = np.argsort(samples)
        columns = (getattr(self, field.name)[order] for field in fields(self)[:5])
        logits = None if self.logits is None else self.logits[order]
        return replace(Scores(*columns), logits=logits)

    def describe_nonfinite(self) -> str | None:
        """Return for how many images the loss or confidence is not finite, and the first such
        value; None if all are finite.

        >>> numbers, infinite = np.ones(2, np.float32), np.array([1, np.inf], np.float32)
        >>> Scores(infinite, numbers, numbers, numbers, numbers).describe_nonfinite()
        'it is inf for 1 of 2 images'
        """
        for values in (self.losses, self.confidences):
            bad = values[~np.isfinite(values)]
            if len(bad):
                return f"it is {bad[0]} for {len(bad)} of {len(values)} images"
        return None

    def per_class(self, classes: int) -> ClassCounts:
        """Return the numbers of images, hits and predictions of every class.

        A model can predict classes beyond those of the images; they are not counted.
        """
        predictions = self.predictions[self.predictions < classes]
        return {
            "images": np.bincount(self.labels, minlength=classes).tolist(),
            "top1": np.bincount(self.labels[self.ranks < 1], minlength=classes).tolist(),
            "top5": np.bincount(self.labels[self.ranks < 5], minlength=classes).tolist(),
            "predicted": np.bincount(predictions, minlength=classes).tolist(),
        }


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation: how it is computed, and how it is shown."""

    name: str
    """Its name in settings such as `selection`."""
    title: str
    """What it is called where it is shown."""
    meaning: str
    compute: Callable[[Scores, int], float | None]
    """Returns it, from the scores of all images and the number of classes; None if there is nothing
    to count."""
    unit: str = " %"
    digits: int = 2
    more_is_better: bool = True
    hits_within: int = 0
    """It is the share of images whose class is among this many most probable ones; 0: it is not
    such a share."""
    is_of_classes: bool = False
    """Whether it is a mean over classes. Lines of text have these together."""

    @property
    def key(self) -> str:
        """Its key in logs, JSON and loggers."""
        return f"{self.name}_percent" if self.unit == " %" else self.name

    @property
    def heading(self) -> str:
        """Its title at the start of a line."""
        return self.title[0].upper() + self.title[1:]

    def format(self, value: float | None) -> str:
        """Return a value as it is shown. Files have null for a value that is not finite.

        >>> METRICS["loss"].format(0.34567), METRICS["loss"].format(None)
        ('0.3457', 'not finite')
        """
        if value is None or not math.isfinite(value):
            return "not finite"
        return f"{value:.{self.digits}f}{self.unit}"

    def describe(self, result: Mapping[str, Any], *, short: bool = False) -> str:
        """Return its value in a result as it is shown: top-1 with its 95 % interval, unless
        `short`."""
        value = result[self.key]
        if self.hits_within == 1 and "images" in result and not short:
            interval = result["top1_interval_percent"] if "sets" in result else None
            return format_accuracy(value, result["images"], interval)
        return self.format(value)

    def is_informative(self, classes: int) -> bool:
        """Return whether it is shown for this many classes. If nearly all of them count as a hit,
        it is not."""
        return self.hits_within <= 1 or classes > self.hits_within


def _average_losses(scores: Scores, classes: int) -> float:
    """Return the mean loss. It does not depend on the order of the images."""
    return float(np.sort(scores.losses.astype(np.float64)).sum()) / len(scores.losses)


def _count_hits(most: int, scores: Scores, classes: int) -> float:
    return 100 * int((scores.ranks < most).sum()) / len(scores.ranks)


def _average_reciprocal_ranks(scores: Scores, classes: int) -> float:
    return float((1 / (1.0 + np.sort(scores.ranks))).mean())


def _average_classes(key: str, scores: Scores, classes: int) -> float | None:
    mean: Any = summarise_classes(scores.per_class(classes)).get(key)
    return mean


def _make_top(most: int) -> Metric:
    meaning = f"right class among the {most} most probable"
    compute = partial(_count_hits, most)
    return Metric(f"top{most}", f"top-{most}", meaning, compute, hits_within=most)


_balanced = partial(_average_classes, "balanced_accuracy_percent")
_f1 = partial(_average_classes, "macro_f1_percent")
_ROWS = (
    Metric("loss", "loss", "cross-entropy", _average_losses, "", 4, more_is_better=False),
    _make_top(1),
    _make_top(5),
    Metric("balanced_accuracy", "balanced accuracy", "mean recall", _balanced, is_of_classes=True),
    Metric("macro_f1", "macro F1", "mean over classes", _f1, is_of_classes=True),
    Metric("mrr", "mean reciprocal rank", "of the right class", _average_reciprocal_ranks, "", 4),
)
METRICS = {metric.name: metric for metric in _ROWS}
"""The metrics by name. There is also `topK` for every other K."""
_TOP = re.compile("top[1-9][0-9]{0,5}")
LOGGED = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
"""Every evaluation has these, in this order. Others are computed where settings name them."""


def is_metric(name: Any) -> bool:
    """Return whether a value is the name of a metric: of `METRICS`, or `topK` for any K from 1."""
    return isinstance(name, str) and (name in METRICS or bool(_TOP.fullmatch(name)))


def find_metric(name: str) -> Metric:
    """Return the metric of a name. Raises `ValueError` if there is none."""
    if not is_metric(name):
        raise ValueError(f"expected {', '.join(METRICS)}, or topK such as top3")
    return METRICS.get(name) or _make_top(int(name.removeprefix("top")))


def measure(scores: Scores, classes: int, names: Iterable[str] = ()) -> dict[str, float]:
    """Return the metrics of `LOGGED` and of `names` by key, without those that count nothing."""
    figures = {}
    for metric in map(find_metric, [*LOGGED, *names]):
        value = metric.compute(scores, classes)
        if value is not None:
            figures[metric.key] = value
    return figures


def list_metrics(result: Mapping[str, Any], classes: int) -> list[Metric]:
    """Return the metrics of a result that are shown for this many classes. Those whose smaller
    values are better come last.

    >>> result = {"step": 8, "loss": 1.5, "top5_percent": 100.0, "top3_percent": 60.0, "mrr": 0.5}
    >>> [metric.title for metric in list_metrics(result, 5)]
    ['top-3', 'mean reciprocal rank', 'loss']
    """
    metrics = []
    for key, value in result.items():
        name = key.removesuffix("_percent")
        if is_metric(name) and find_metric(name).key == key and is_figure(value):
            metrics.append(find_metric(name))
    shown = filter(lambda metric: metric.is_informative(classes), metrics)
    return sorted(shown, key=lambda metric: not metric.more_is_better)


def describe_metrics(result: Mapping[str, Any], classes: int) -> list[tuple[str, str]]:
    """Return the metrics of a result as rows for a person to read: title and value. Means over
    classes are one row."""
    rows = []
    means = []
    for metric in list_metrics(result, classes):
        text = metric.describe(result)
        if metric.is_of_classes:
            means.append(f"{metric.title} {text}")
        elif metric.hits_within == 1:
            rows.append((metric.title, f"{text} of {format_count(result['images'], 'image')}"))
        else:
            rows.append((metric.title, text))
    if means:
        rows.insert(1, ("classes", ", ".join(means)))
    return rows
