"""Calibration: how reliable probabilities are, and which images are unknown.

Networks are usually overconfident. Their logits are divided by one number, the temperature, before
softmax (Guo et al. 2017, arXiv:1706.04599), which keeps the order of the classes. An image is
unknown if its top class is less probable than a threshold.

Both are in `calibration.json` in a checkpoint's folder. The file is written after the checkpoint,
which never changes, and names the weights by their SHA-256, so it belongs to this checkpoint and
its copies alone. `model.safetensors` and `ema.safetensors` have an entry each.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from lockstep.data import Batch
from lockstep.models.accuracy_interval import wilson
from lockstep.system.errors import CheckpointError, DataError
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_number, is_rate, parsed
from lockstep.system.text import format_count
from lockstep.weights.checkpoint import read_digest
from lockstep.weights.formats import naming_target

LEAST_IMAGES = 20
"""A temperature is fitted to at least this many images."""
RANGE = 20.0
"""Temperatures are from 1/20 to 20. Beyond, logits mean nothing, or all images are right."""
BINS = 15
"""Bins of the expected calibration error, as in the paper."""
_ROWS = 4096
"""This many images are computed at once."""
_MOST_STEPS = 100
FILE = "calibration.json"
KEY = "calibration"
"""The key of the fields of a calibration in the metadata of other files."""


@dataclass(frozen=True)
class Calibration:
    """What turns the logits of a model into probabilities."""

    temperature: float = 1.0
    """Logits are divided by it before softmax."""
    unknown_below: float = 0.0
    """An image is unknown if its top class is less probable than this; 0: none is."""


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


@dataclass(frozen=True)
class Bin:
    """The images whose confidence lies in (low, high]."""

    low: float
    high: float
    images: int
    right: int
    confidence: float
    """Mean confidence of the images; 0 if there are none."""


def bin_confidences(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
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


def compute_calibration_error(bins: list[Bin]) -> float | None:
    """Return the expected calibration error: the mean over images of the gap between a bin's
    accuracy and mean confidence; None if there are no images.

    >>> compute_calibration_error(bin_confidences(np.full(10, 0.9), np.arange(10) < 7))
    0.2
    """
    images = 0
    gaps = 0.0
    for group in bins:
        images += group.images
        gaps += abs(group.right - group.images * group.confidence)
    return round(gaps / images, 12) if images else None


def collect_logits(
    predict: Callable[[np.ndarray], np.ndarray], batches: Iterable[Batch]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits, float32 [N, logits], and the labels, int64 [N], of every image that is not
    padding. `predict` is that of an engine or a runtime."""
    logits = []
    labels = []
    for batch in batches:
        counted = batch.labels >= 0
        logits.append(predict(batch.pixels)[counted])
        labels.append(batch.labels[counted])
    if not labels:
        return np.zeros((0, 1), np.float32), np.zeros(0, np.int64)
    return np.concatenate(logits), np.concatenate(labels).astype(np.int64)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> tuple[TemperatureFit | None, str]:
    """Return the temperature with the smallest mean cross-entropy of logits [N, classes] and labels
    [N]; or None, and why there is none, as a clause.

    There is none if there are too few images, if the smallest one is outside `RANGE`, as it is when
    every image is right, or if it makes the calibration error greater, as it can on a few images.
    The same logits always give the same temperature.
    """
    images = len(labels)
    if images < LEAST_IMAGES:
        return None, f"{format_count(images, 'validation image')}, fewer than {LEAST_IMAGES}"
    if (logits.argmax(axis=1) == labels).all():
        return None, f"all {images} validation images are right"
    temperature = _minimise_loss(logits, labels)
    if temperature is None:
        return None, f"the loss has no minimum from {1 / RANGE:g} to {RANGE:g}"
    fit = _measure_fit(logits, labels, temperature)
    before = fit["error_percent_before"]
    after = fit["error_percent_after"]
    if after <= before:
        return fit, ""
    return None, (
        f"{temperature:.3g} has the smallest loss, but changes the calibration error on the"
        f" {format_count(images, 'image')} from {before:.1f} to {after:.1f} %"
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
        bins = bin_confidences(probabilities.max(axis=1), hits)
        errors.append(100 * (compute_calibration_error(bins) or 0.0))
    return {
        "temperature": temperature,
        "images": len(labels),
        "loss_before": losses[0],
        "loss_after": losses[1],
        "error_percent_before": errors[0],
        "error_percent_after": errors[1],
    }


def _minimise_loss(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the temperature at which the derivative of the loss is 0; None if it is out of range.

    The loss is convex in 1 / temperature. Newton's steps, or halves of the interval that holds the
    solution if a step leaves it, find it.
    """
    low = 1 / RANGE
    high = RANGE
    if not _differentiate(logits, labels, low)[0] < 0 < _differentiate(logits, labels, high)[0]:
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


def describe_fit(fit: TemperatureFit | None, reason: str) -> str:
    """Return the result of fitting a temperature, for people. `reason` is why there is none."""
    if fit is None:
        return f"no temperature: {reason}"
    return (
        f"temperature {fit['temperature']:.3g}: the calibration error on"
        f" {fit['images']} validation images is {fit['error_percent_after']:.1f} %,"
        f" {fit['error_percent_before']:.1f} % without it"
    )


def choose_threshold(confidences: np.ndarray, hits: np.ndarray, precision: float) -> Threshold:
    """Return the threshold that answers the most images with at least this precision, above 0 and
    at most 1.

    `confidences` are the probabilities of the top classes [N], `hits` whether these are
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
            f" images the highest possible is {100 * best:g} %: {advice}"
        )
    count = int(reached[-1]) + 1
    unknown_below = 0.0
    if count < len(hits):
        unknown_below = float(sorted_confidences[count - 1 : count + 1].mean())
    right = int(hits[order][:count].sum())
    return {
        "wanted_percent": 100 * precision,
        "unknown_below": unknown_below,
        "precision_percent": 100 * right / count,
        "precision_interval_percent": [100 * bound for bound in wilson(right, count)],
        "answered": count,
        "answered_percent": 100 * count / len(hits),
    }


def write_calibration(
    file: Path, fit: TemperatureFit | None, threshold: Threshold | None = None
) -> None:
    """Write the calibration of a checkpoint's file of weights next to it.

    Without `fit` the stored temperature stays. Without `threshold` the stored threshold stays, if
    it belongs to the same temperature. Raises `CheckpointError` if the file cannot be written.
    """
    path = file.parent / FILE
    entries = _read_entries(path)
    digest = read_digest(file)
    entry: Any = entries.get(file.name)
    if not isinstance(entry, dict) or entry.get("sha256") != digest:
        entry = {"sha256": digest, "temperature": 1.0}
    if fit is not None and fit["temperature"] != entry.get("temperature"):
        entry = {"sha256": digest}
    entries[file.name] = entry | dict(fit or {}) | dict(threshold or {})
    with naming_target(path):
        write_json(path, entries)


def read_calibration(file: Path) -> tuple[Calibration, tuple[str, ...]]:
    """Return what was found for a checkpoint's file of weights, and remarks. Raises
    `CheckpointError` if `calibration.json` is damaged."""
    path = file.parent / FILE
    entry = _read_entries(path).get(file.name)
    if entry is None:
        return UNCALIBRATED, ()
    if not isinstance(entry, dict) or entry.get("sha256") != read_digest(file):
        return UNCALIBRATED, (f"{path} belongs to other weights and was ignored",)
    return parse_calibration(entry, path), ()


def parse_calibration(value: Any, source: Path) -> Calibration:
    """Return the calibration in metadata. Raises `CheckpointError` if it is not one."""
    values = value if isinstance(value, dict) else {}
    temperature = values.get("temperature")
    threshold = values.get("unknown_below", 0.0)
    if not is_rate(temperature) or not is_number(threshold) or not 0 <= threshold <= 1:
        raise CheckpointError(
            f"{source}: {KEY} is {value!r:.100}; expected a temperature above 0, and perhaps a"
            " threshold from 0 to 1. Calibrate its run again: lockstep evaluate RUN --data DATA"
            " --calibrate"
        )
    return Calibration(float(values["temperature"]), float(threshold))


def _read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a `calibration.json` by file; none if there is no such file."""
    try:
        entries = parsed(read_regular(path, TEXT))
        if not isinstance(entries, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; remove it to continue without it"
        ) from None
    return entries
