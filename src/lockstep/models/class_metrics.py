"""How well single classes are predicted, and means over classes in which every class counts the
same, however many images it has."""

from typing import NotRequired

import numpy as np
from typing_extensions import TypedDict

from lockstep.system.schema import Count

FEW_IMAGES = 20
"""A class with fewer images than this is marked: the 95 % interval of 19 hits of 19 is 83 to 100 %.
"""


class ClassCounts(TypedDict):
    """Numbers of images for every class, in the order of the classes."""

    images: list[Count]
    top1: list[Count]
    """Images of the class that the model puts into it."""
    top5: list[Count]
    """Images of the class for which it is among the five most probable."""
    predicted: NotRequired[list[Count]]
    """Images of any class that the model puts into the class; missing in older reports."""


class ClassSummary(TypedDict):
    """Figures of classes in percent; None where there is no image to count."""

    balanced_accuracy_percent: float | None
    """The mean recall of the classes that have images."""
    macro_f1_percent: float | None
    """The mean F1 of the classes that have images."""
    recall_percent: list[float | None]
    """By class: how many of its images are predicted as it."""
    precision_percent: list[float | None]
    """By class: how many of the images that are predicted as it belong to it."""


def summarise_classes(counts: ClassCounts) -> ClassSummary:
    """Return recall and precision of every class, and means over classes.

    >>> counts = {"images": [2, 2, 2], "top1": [2, 0, 0], "top5": [2, 2, 2], "predicted": [3, 2, 1]}
    >>> summary = summarise_classes(counts)
    >>> round(summary["balanced_accuracy_percent"], 2), round(summary["macro_f1_percent"], 2)
    (33.33, 26.67)
    """
    images = np.array(counts["images"], np.float64)
    hits = np.array(counts["top1"], np.float64)
    predicted = np.array(counts.get("predicted", []), np.float64)
    recall = _divide(hits, images)
    if not predicted.size:
        precision = f1 = np.full(images.shape, np.nan)
    else:
        precision = _divide(hits, predicted)
        f1 = np.where(images > 0, _divide(2 * hits, images + predicted), np.nan)
    return {
        "balanced_accuracy_percent": _average(recall),
        "macro_f1_percent": _average(f1),
        "recall_percent": _to_percent(recall),
        "precision_percent": _to_percent(precision),
    }


def find_small_classes(counts: ClassCounts) -> list[int]:
    """Return the classes that have images, but fewer than `FEW_IMAGES`."""
    images = np.array(counts["images"], np.int64)
    return np.flatnonzero((images > 0) & (images < FEW_IMAGES)).tolist()


def _divide(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Divide; NaN where a denominator is 0."""
    return np.divide(
        numerators, denominators, out=np.full(numerators.shape, np.nan), where=denominators > 0
    )


def _average(shares: np.ndarray) -> float | None:
    known = shares[~np.isnan(shares)]
    return 100 * float(known.mean()) if known.size else None


def _to_percent(shares: np.ndarray) -> list[float | None]:
    return [None if np.isnan(share) else 100 * float(share) for share in shares]
