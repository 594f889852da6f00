"""How far probabilities can be believed: temperature scaling (Guo et al. 2017, arXiv:1706.04599),
and a threshold below which an image is unknown.

A network that is trained until it fits is surer than it is right. Its logits are divided by one
number, the temperature, before softmax. The order of the classes stays as it is.
"""

import math
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from lockstep.models.accuracy_interval import wilson
from lockstep.system.errors import DataError

LEAST_IMAGES = 20
"""A temperature is not fitted to fewer images."""
RANGE = 20.0
"""Temperatures are between 1/20 and 20. Outside, the logits say nothing, or all images are right.
"""
BINS = 15
"""Bins of the expected calibration error, as in the paper."""
_ROWS = 4096
"""This many images are computed at once."""
_MOST_STEPS = 100


@dataclass(frozen=True)
class Calibration:
    """What turns the logits of a model into probabilities."""

    temperature: float = 1.0
    """Logits are divided by it before softmax."""
    unknown_below: float = 0.0
    """An image is unknown if the probability of its likeliest class is below this; 0: none is."""


UNCALIBRATED = Calibration()


class TemperatureFit(TypedDict):
    """A temperature, and what it changes on the images that it was fitted to."""

    temperature: float
    images: int
    loss_before: float
    """The mean cross-entropy at temperature 1."""
    loss_after: float
    error_percent_before: float
    """The expected calibration error at temperature 1."""
    error_percent_after: float


class Threshold(TypedDict):
    """A threshold that was chosen for a precision, and what it does to the images of the choice."""

    wanted_percent: float
    """The precision to reach at least."""
    unknown_below: float
    precision_percent: float
    """The share of the answered images that are right. An image is answered if it is not unknown.
    """
    precision_interval_percent: list[float]
    """Its 95 % interval."""
    answered: int
    answered_percent: float


def compute_probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the softmax of logits [..., classes] over a temperature, float64.

    >>> compute_probabilities(np.array([0.0, 2 * math.log(3)]), temperature=2.0).round(6)
    array([0.25, 0.75])
    """
    scaled = (logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)) / temperature
    powers = np.exp(scaled)
    probabilities: np.ndarray = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> TemperatureFit | None:
    """Return the temperature with the smallest mean cross-entropy of logits [N, classes] and labels
    [N].

    None if there are too few images, if the smallest one is outside `RANGE`, as it is when every
    image is right, or if it makes the calibration error greater, as it can on a few images. The
    same logits always give the same temperature.
    """
    temperature = _minimise_loss(logits, labels) if len(labels) >= LEAST_IMAGES else None
    if temperature is None:
        return None
    fit = _measure_fit(logits, labels, temperature)
    return None if fit["error_percent_after"] > fit["error_percent_before"] else fit


def explain_missing_fit(logits: np.ndarray, labels: np.ndarray) -> str:
    """Return, as a clause, why `fit_temperature` finds no temperature for these."""
    images = len(labels)
    if images < LEAST_IMAGES:
        return f"{images} validation images are fewer than {LEAST_IMAGES}"
    if (logits.argmax(axis=1) == labels).all():
        return f"all {images} validation images are right"
    temperature = _minimise_loss(logits, labels)
    if temperature is None:
        return f"none from {1 / RANGE:g} to {RANGE:g} has the smallest loss"
    fit = _measure_fit(logits, labels, temperature)
    before = fit["error_percent_before"]
    after = fit["error_percent_after"]
    return (
        f"{temperature:.3g} has the smallest loss, but changes the calibration error on the"
        f" {images} images from {before:.1f} to {after:.1f} %"
    )


def _measure_fit(logits: np.ndarray, labels: np.ndarray, temperature: float) -> TemperatureFit:
    """Return what a temperature changes."""
    hits = logits.argmax(axis=1) == labels
    losses = []
    errors = []
    for value in (1.0, temperature):
        probabilities = compute_probabilities(logits, value)
        of_labels = np.take_along_axis(probabilities, labels[:, None], axis=1)
        losses.append(float(-np.log(np.maximum(of_labels, np.finfo(np.float64).tiny)).mean()))
        errors.append(100 * compute_calibration_error(probabilities.max(axis=1), hits))
    return {
        "temperature": temperature,
        "images": len(labels),
        "loss_before": losses[0],
        "loss_after": losses[1],
        "error_percent_before": errors[0],
        "error_percent_after": errors[1],
    }


def choose_threshold(confidences: np.ndarray, hits: np.ndarray, precision: float) -> Threshold:
    """Return the threshold that answers the most images with at least this precision, above 0 and
    at most 1.

    `confidences` are the probabilities of the likeliest classes [N], `hits` whether these are
    right, bool [N]. The threshold is halfway between the last image that is answered and the first
    that is not. Raises `DataError` if no threshold reaches the precision.

    >>> confidences, hits = np.array([0.9, 0.8, 0.6, 0.5]), np.array([True, True, False, True])
    >>> choose_threshold(confidences, hits, 0.9)["unknown_below"]
    0.7
    """
    order = np.argsort(-confidences, kind="stable")
    sorted_confidences = confidences[order].astype(np.float64)
    answered = np.arange(1, len(hits) + 1)
    shares = hits[order].cumsum() / answered
    # Images of the same confidence are answered together.
    is_last = np.append(sorted_confidences[1:] < sorted_confidences[:-1], True)
    reached = np.flatnonzero(is_last & (shares >= precision))
    if not reached.size:
        best = math.floor(1e4 * float(shares[is_last].max()) + 1e-6) / 1e4
        advice = f"ask for {best:g} or less" if best else "train a better model first"
        raise DataError(
            f"no threshold reaches a precision of {100 * precision:g} %; on these {len(hits)}"
            f" images the highest that one can reach is {100 * best:g} %: {advice}"
        )
    last = int(reached[-1])
    count = last + 1
    unknown_below = 0.0
    if count < len(hits):
        unknown_below = float(sorted_confidences[last : last + 2].mean())
    right = int(hits[order][:count].sum())
    return {
        "wanted_percent": 100 * precision,
        "unknown_below": unknown_below,
        "precision_percent": 100 * right / count,
        "precision_interval_percent": [100 * bound for bound in wilson(right, count)],
        "answered": count,
        "answered_percent": 100 * count / len(hits),
    }


def compute_calibration_error(confidences: np.ndarray, hits: np.ndarray) -> float:
    """Return the expected calibration error: the mean distance of confidence and accuracy, over
    `BINS` equal bins of the confidence [N], weighted by their images. `hits` are bool [N].

    >>> compute_calibration_error(np.full(10, 0.9), np.arange(10) < 7)
    0.2
    """
    bins = np.minimum((confidences * BINS).astype(np.int64), BINS - 1)
    surplus = np.bincount(bins, weights=confidences - hits, minlength=BINS)
    return round(float(np.abs(surplus).sum()) / len(hits), 12)


def _minimise_loss(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the temperature at which the derivative of the loss is 0; None if it is out of range.

    The loss is convex in 1 / temperature. Newton's steps, or halves of the interval that holds the
    solution if a step leaves it, find it.
    """
    low, high = 1 / RANGE, RANGE
    if _differentiate(logits, labels, low)[0] >= 0 or _differentiate(logits, labels, high)[0] <= 0:
        return None
    inverse = 1.0
    for _ in range(_MOST_STEPS):
        slope, curvature = _differentiate(logits, labels, inverse)
        if slope > 0:
            high = inverse
        else:
            low = inverse
        following = inverse - slope / curvature if curvature > 0 else math.inf
        if not low < following < high:
            following = math.sqrt(low * high)
        if abs(following - inverse) <= 1e-12 * inverse:
            break
        inverse = following
    return float(f"{1 / inverse:.9g}")


def _differentiate(logits: np.ndarray, labels: np.ndarray, inverse: float) -> tuple[float, float]:
    """Return the first two derivatives of the mean cross-entropy by 1 / temperature: of each image,
    the mean logit under softmax less the label's logit, and the variance of the logits."""
    slope = 0.0
    curvature = 0.0
    for first in range(0, len(labels), _ROWS):
        rows = logits[first : first + _ROWS].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        probabilities = compute_probabilities(rows, 1 / inverse)
        means = (probabilities * rows).sum(axis=1)
        of_labels = np.take_along_axis(rows, labels[first : first + _ROWS, None], axis=1)[:, 0]
        slope += float((means - of_labels).sum())
        curvature += float(((probabilities * rows**2).sum(axis=1) - means**2).sum())
    return slope / len(labels), curvature / len(labels)
