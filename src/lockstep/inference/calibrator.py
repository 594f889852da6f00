"""Calibrate probabilities: fit a temperature to the images of an evaluation, and choose a threshold
for a precision."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends.reference import functions
from lockstep.data import Batch
from lockstep.inference.session import Session
from lockstep.models.metrics import Scores
from lockstep.runs.calibrated_results import add_calibrated
from lockstep.system.errors import CheckpointError, UserError
from lockstep.system.ranks import count_ranks
from lockstep.system.text import format_count
from lockstep.weights import Weights
from lockstep.weights.calibration import (
    LEAST_IMAGES,
    Threshold,
    choose_threshold,
    collect_logits,
    compute_probabilities,
    fit_temperature,
    read_calibration,
    write_calibration,
)


class Calibrator:
    """Evaluates images, and keeps their logits."""

    def __init__(self, weights: Weights, precision: float | None) -> None:
        """Keep the precision that a threshold is chosen for, if there is one.

        Raises `UserError` if it is not a precision, or under a launcher, and `CheckpointError` if a
        temperature of the weights could not be stored.
        """
        if precision is not None and not 0 < precision <= 1:
            raise UserError(f"the precision is {precision}; expected a share such as 0.99")
        if weights.checkpoint_file is None:
            raise CheckpointError(
                f"{weights.source} is not a checkpoint of a run, so it has no place for a"
                " temperature; calibrate the run, then export or convert it"
            )
        if count_ranks() > 1:
            raise UserError("--calibrate computes in one process; start it without a launcher")
        self._precision = precision
        self._file = weights.checkpoint_file
        self._logits = np.zeros((0, 1), np.float32)
        self._labels = np.zeros(0, np.int64)

    def watch(self, session: Session) -> Session:
        """Return a session that evaluates like this one and stores its logits here."""
        return replace(session, evaluate=partial(self._evaluate, session.predict))

    def _evaluate(
        self, predict: Callable[[np.ndarray], np.ndarray], batches: Iterable[Batch]
    ) -> Scores:
        """Return the scores of every image that is not padding."""
        self._logits, self._labels = collect_logits(predict, batches)
        table = functions.score(self._logits.astype(np.float64), self._labels)
        return Scores.unpack_table(table)

    def store(self, warn: Callable[[str], None]) -> dict[str, Any]:
        """Fit a temperature, choose a threshold if one is wanted, and store them with the
        checkpoint. If there is neither, the stored ones stay. Without a new temperature, the
        threshold is chosen for the stored one. A run's results for the same images get the
        calibrated confidences, which its report shows. `warn` is called if few images are answered.

        The result has both as `calibration` and `threshold`. `calibration_reason` says why there is
        no calibration; `temperature` is the one in use, 1 without one.
        Raises `DataError` if no threshold reaches the precision.
        """
        fit, reason = fit_temperature(self._logits, self._labels)
        stored, _ = read_calibration(self._file)
        temperature = stored.temperature if fit is None else fit["temperature"]
        threshold = None
        if self._precision is not None:
            probabilities = compute_probabilities(self._logits, temperature)
            hits = self._logits.argmax(axis=1) == self._labels
            threshold = choose_threshold(probabilities.max(axis=1), hits, self._precision)
            if threshold["answered"] < LEAST_IMAGES:
                warn(_describe_few(threshold))
        if fit is not None or threshold is not None:
            write_calibration(self._file, fit, threshold)
        if temperature != 1:
            add_calibrated(self._file, self._logits, self._labels, temperature)
        return {
            "calibration": fit,
            "calibration_reason": reason,
            "temperature": temperature,
            "threshold": threshold,
        }


def _describe_few(threshold: Threshold) -> str:
    low, high = threshold["precision_interval_percent"]
    return (
        f"the threshold rests on {format_count(threshold['answered'], 'answered image')}; expected"
        f" at least {LEAST_IMAGES}. On other images, {low:.0f} to {high:.0f} % of the answers may"
        " be right: use more validation images, or a lower precision (predict --unknown-below 0"
        " ignores the threshold)"
    )
