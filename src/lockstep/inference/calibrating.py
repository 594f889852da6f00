"""Fit a temperature to the images of an evaluation, for probabilities that can be believed."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.backends.reference import functions
from lockstep.data import Batch
from lockstep.inference.computation import Computation
from lockstep.models.calibration import TemperatureFit, fit_temperature
from lockstep.models.metrics import Scores
from lockstep.runs.temperature import collect_logits
from lockstep.system.errors import CheckpointError, UserError
from lockstep.weights import Weights
from lockstep.weights.calibration_file import write_calibration


class Calibrator:
    """Evaluates images, and keeps their logits."""

    def __init__(self, weights: Weights) -> None:
        """Raise an error if a temperature of the weights could not be stored, or under a
        launcher."""
        if weights.checkpoint_file is None:
            raise CheckpointError(
                f"{weights.source} is not a checkpoint of a run, so it has no place for a"
                " temperature; calibrate the run, then export or convert it"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("--calibrate computes in one process; start it without a launcher")
        self._file = weights.checkpoint_file
        self._logits = np.zeros((0, 1), np.float32)
        self._labels = np.zeros(0, np.int64)

    def watch(self, computation: Computation) -> Computation:
        """Return a computation that evaluates as this one, and leaves its logits here."""
        return replace(computation, evaluate=partial(self._evaluate, computation.predict))

    def _evaluate(
        self, predict: Callable[[np.ndarray], np.ndarray], batches: Iterable[Batch]
    ) -> Scores:
        """Return the scores of every image that is not padding."""
        self._logits, self._labels = collect_logits(predict, batches)
        table = functions.score(self._logits.astype(np.float64), self._labels)
        return Scores.unpack_table(table)

    def store_fit(self) -> TemperatureFit | None:
        """Fit a temperature and store it with the checkpoint. None if none fits; then a stored one
        stays."""
        fit = fit_temperature(self._logits, self._labels)
        if fit is not None:
            write_calibration(self._file, fit)
        return fit
