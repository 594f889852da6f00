"""The calibrated confidences of a run's validation images.

An evaluation keeps confidences at temperature 1, because the temperature is fitted later. After
that, `trained.calibrated` and the `trained.temperature` used for it are added to the results.
"""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.models.metrics import Scores
from lockstep.runs.image_results import BEST_FILE, DAMAGE, FILE, Results, read_records, write_arrays
from lockstep.runs.reading import Run
from lockstep.system.errors import CheckpointError
from lockstep.weights.calibration import compute_probabilities, read_calibration
from lockstep.weights.checkpoint import checkpoint_path, find_weights_file

_SAME = 0.02
"""Confidences of the same image differ by less between engines."""


def add_calibrated(file: Path, logits: np.ndarray, labels: np.ndarray, temperature: float) -> None:
    """Add confidences at the temperature of a checkpoint's file of weights to its run's results.

    Nothing is added to results of other images, nor to files that cannot be read or written.
    """
    run = file.parent.parent.parent
    weights = "ema" if file == find_weights_file(file.parent, ema=True) else "trained"
    raw = compute_probabilities(logits).max(axis=1)
    calibrated = compute_probabilities(logits, temperature).max(axis=1).astype(np.float32)
    for name in (FILE, BEST_FILE):
        with suppress(OSError, *DAMAGE):
            arrays = read_records(run / name)
            is_same = file.parent.name == checkpoint_path(run, int(arrays["step"])).name
            is_same = is_same and np.array_equal(arrays["labels"], labels)
            if is_same and np.allclose(arrays[f"{weights}.confidences"], raw, rtol=0, atol=_SAME):
                arrays[f"{weights}.calibrated"] = calibrated
                arrays[f"{weights}.temperature"] = np.array(temperature)
                write_arrays(run / name, arrays)


def calibrate_scores(run: Run, results: Results, weights: str) -> tuple[Scores, str]:
    """Return the scores of some weights, with the confidences that `predict` gives if the run has
    them, and the temperature in words."""
    scores = results.scores[weights]
    stored, confidences = _read_calibrated(run.folder, results.step, weights, scores)
    temperature = stored
    folder = checkpoint_path(run.folder / "checkpoints", results.step)
    if folder.is_dir():
        temperature = 1.0
        with suppress(CheckpointError):  # of a damaged file, which predict reports
            calibration, _ = read_calibration(find_weights_file(folder, ema=weights == "ema"))
            temperature = calibration.temperature
    if temperature == 1:
        return scores, "no temperature"
    if not math.isclose(temperature, stored, rel_tol=1e-6):
        return scores, f"before temperature {temperature:.3g}"
    return replace(scores, confidences=confidences), f"temperature {temperature:.3g}"


def _read_calibrated(
    folder: Path, step: int, weights: str, scores: Scores
) -> tuple[float, np.ndarray]:
    """Return the temperature and the confidences that were added to the results of a step; 1 and
    the confidences of the scores if there are none, or if they are damaged."""
    for name in (FILE, BEST_FILE):
        with suppress(OSError, *DAMAGE):
            arrays = read_records(folder / name)
            confidences = arrays[f"{weights}.calibrated"]
            temperature = float(arrays[f"{weights}.temperature"])
            fits = confidences.shape == scores.labels.shape and confidences.dtype.kind == "f"
            fits = fits and bool(((confidences >= 0) & (confidences <= 1.01)).all())
            if fits and int(arrays["step"]) == step and 0 < temperature < math.inf:
                return temperature, confidences
    return 1.0, scores.confidences
