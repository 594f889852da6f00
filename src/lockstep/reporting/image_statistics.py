"""Compute calibration and confusion from the results of single images. All are pure functions of
arrays."""

from dataclasses import dataclass

import numpy as np

CALIBRATION_BINS = 15
"""Bins of equal width, as in Guo et al. 2017 (arXiv:1706.04599)."""


@dataclass(frozen=True)
class Bin:
    """The images whose confidence lies in (low, high]."""

    low: float
    high: float
    images: int
    right: int
    confidence: float
    """Mean confidence of the images; 0 if there are none."""

    @property
    def accuracy(self) -> float:
        """The share of images that are right; 0 if there are none."""
        return self.right / max(self.images, 1)


def bin_confidences(
    confidences: np.ndarray, right: np.ndarray, bins: int = CALIBRATION_BINS
) -> list[Bin]:
    """Return bins of equal width over the confidences, [images], with how many of each bin are
    `right`, bool [images].

    Confidences that are NaN or infinite are left out.
    """
    known = np.isfinite(confidences)
    values = confidences[known].astype(np.float64)
    hits = right[known]
    numbers = np.clip(np.ceil(values * bins).astype(np.int64) - 1, 0, bins - 1)
    images = np.bincount(numbers, minlength=bins)
    right_images = np.bincount(numbers[hits], minlength=bins)
    means = np.bincount(numbers, weights=values, minlength=bins) / np.maximum(images, 1)
    edges = np.arange(bins + 1) / bins
    columns = (edges[:-1], edges[1:], images, right_images, means)
    return list(map(Bin, *(column.tolist() for column in columns)))


def measure_calibration_error(bins: list[Bin]) -> float | None:
    """Return the expected calibration error: the mean over images of the gap between a bin's
    accuracy and mean confidence.

    Return None if there are no images.
    """
    images = 0
    gaps = 0.0
    for group in bins:
        images += group.images
        gaps += group.images * abs(group.accuracy - group.confidence)
    return gaps / images if images else None


def count_confusions(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Return how many images of each class (row) were taken for each class (column): int64
    [classes, classes]."""
    return np.bincount(
        labels.astype(np.int64) * classes + predictions, minlength=classes**2
    ).reshape(classes, classes)


def group_classes(matrix: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Return a square matrix with neighbouring classes added up to at most `most` groups, and the
    classes in each group."""
    size = -(-len(matrix) // most)
    first = np.arange(0, len(matrix), size)
    return np.add.reduceat(np.add.reduceat(matrix, first, axis=0), first, axis=1), size


def find_frequent_mistakes(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each class the other class its images were most often taken for, and how often:
    int64 [classes] each."""
    mistakes = matrix - np.diag(np.diag(matrix))
    return mistakes.argmax(axis=1), mistakes.max(axis=1)


def find_confused_pairs(matrix: np.ndarray, count: int) -> list[tuple[int, int, int]]:
    """Return at most `count` of the most frequent mistakes as (class, taken for, images), the most
    frequent first."""
    mistakes = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-mistakes, axis=None, kind="stable")[:count]
    rows, columns = np.unravel_index(order, mistakes.shape)
    pairs = zip(rows.tolist(), columns.tolist(), mistakes[rows, columns].tolist(), strict=True)
    return [pair for pair in pairs if pair[2] > 0]


def find_confident_mistakes(confidences: np.ndarray, right: np.ndarray, count: int) -> list[int]:
    """Return at most `count` wrong images, the most confident first. Images of equal confidence
    keep their order."""
    wrong = np.flatnonzero(~right & np.isfinite(confidences))
    return wrong[np.argsort(-confidences[wrong], kind="stable")][:count].tolist()
