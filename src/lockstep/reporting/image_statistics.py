"""Compute confusion from the results of single images. All are pure functions of arrays."""

import numpy as np


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
