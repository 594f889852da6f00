"""After the last step: a temperature for the probabilities of the best checkpoint, fitted to the
validation images."""

from collections.abc import Iterator
from dataclasses import replace

from lockstep.data import Batch
from lockstep.runs.context import RunContext
from lockstep.weights import checkpoint


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
    from lockstep.weights.calibration import (
        collect_logits,
        describe_fit,
        fit_temperature,
        write_calibration,
    )

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
        fit, reason = fit_temperature(logits, labels)
        run.recorder.note(f"{describe_fit(fit, reason)} (step {step}, {weights} weights)")
        if fit is not None:
            write_calibration(checkpoint.find_weights_file(folder, ema=is_average), fit)
    return True


def _load_batches(run: RunContext, weights: str) -> Iterator[Batch]:
    """Yield all validation images; end early if a stop is requested."""
    from lockstep.runs.evaluation_images import watch_images

    what = f"calibrating {weights}"
    validation = run.sets.validation
    images = watch_images(
        run.recorder, what, validation, run.recipe, run.execution, run.part_images
    )
    for batch in images:
        if run.stop.requested:
            return
        yield batch
