"""After the last step: a temperature for the probabilities of the best checkpoint, fitted to the
validation images."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from lockstep.data import Batch
from lockstep.models.calibration import TemperatureFit, explain_missing_fit, fit_temperature
from lockstep.runs.context import RunContext
from lockstep.runs.evaluation_images import watch_images
from lockstep.weights import checkpoint
from lockstep.weights.calibration_file import write_calibration


def calibrate_best(run: RunContext, step: int) -> None:
    """Fit a temperature to the best checkpoint of a run that ends at this step, if the recipe wants
    one, and write it into the checkpoint's folder.

    Rank 0 computes, with an engine that nobody needs for training any more; the others wait. Raises
    `Interrupted` if a stop is requested; the same command then begins here again.
    """
    if not run.recipe.temperature_scaling or run.execution.train_only:
        return
    is_complete = not run.leads or _calibrate(run)
    if run.world.any(not is_complete):
        run.interrupt(step)


def _calibrate(run: RunContext) -> bool:
    """Return whether all was done before a stop was requested."""
    best = run.find_best()
    if best is None:
        return True
    step = best["step"]
    folder = checkpoint.checkpoint_path(run.checkpoints, step)
    state, _ = checkpoint.load(folder)
    for weights in run.weights_to_evaluate:
        is_average = weights == "ema"
        tensors = state.ema if is_average else state.tensors
        run.engine.write(replace(state, tensors=tensors))
        logits, labels = collect_logits(run.engine.predict, _load_batches(run, weights))
        if run.stop.requested:
            return False
        fit = fit_temperature(logits, labels)
        reason = "" if fit else explain_missing_fit(logits, labels)
        run.recorder.note(f"{describe_fit(fit, reason)} (step {step}, {weights} weights)")
        if fit is not None:
            write_calibration(checkpoint.find_weights_file(folder, ema=is_average), fit)
    return True


def _load_batches(run: RunContext, weights: str) -> Iterator[Batch]:
    """Yield all validation images; end early if a stop is requested."""
    what = f"calibrating {weights}"
    validation = run.sets.validation
    images = watch_images(
        run.recorder, what, validation, run.recipe, run.execution, run.part_images
    )
    for batch in images:
        if run.stop.requested:
            return
        yield batch


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


def describe_fit(fit: TemperatureFit | None, reason: str) -> str:
    """Return the result of fitting a temperature, for people. `reason` is why there is none."""
    if fit is None:
        return f"no temperature is used: {reason}"
    return (
        f"temperature {fit['temperature']:.3g}: the calibration error on"
        f" {fit['images']} validation images is {fit['error_percent_after']:.1f} %,"
        f" {fit['error_percent_before']:.1f} % without it"
    )
