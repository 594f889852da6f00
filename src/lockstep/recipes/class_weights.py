"""The weights of classes in the training loss: the field `class_weights` of a recipe."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NAMED = ("none", "balanced")


def check_class_weights(value: Any) -> Any:
    """Return the value of the field `class_weights`. Raises `ValueError` if it is neither a name
    nor numbers of 0 or more, one of them above 0."""
    is_named = isinstance(value, str) and value in NAMED
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_named or (is_list and all(map(_is_weight, value)) and any(value)):
        return value
    raise ValueError("expected none, balanced, or numbers of 0 or more, one of them above 0")


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def balance_classes(labels: np.ndarray, logits: int) -> tuple[float, ...]:
    """Return the weights that "balanced" stands for: one for each logit.

    `labels` are int64 [images]. A class with images has images / (classes with images * images of
    the class), so that the mean weight of an image is 1. A class without images has 1.
    """
    counts = np.bincount(labels, minlength=logits)
    classes = np.count_nonzero(counts)
    weights = np.where(counts > 0, len(labels) / (classes * np.maximum(counts, 1)), 1.0)
    return tuple(weights.tolist())


def read_class_weights(class_weights: str | tuple[float, ...]) -> np.ndarray | None:
    """Return the weights of a recipe for an engine: float32 [logits]; None if all are 1.

    "balanced" is as "none" here: it becomes numbers when a run begins, and only a run trains.
    """
    return None if isinstance(class_weights, str) else np.array(class_weights, np.float32)
