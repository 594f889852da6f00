"""The scales of a quantised run's inputs, found once before its first step.

They are in the metadata of every checkpoint, whose SHA-256 is checked when it is read. So a run
resumes with the same scales, and a checkpoint alone can be evaluated and exported.
"""

from collections.abc import Iterator
from itertools import islice
from typing import cast

from lockstep.backends import QuantisingEngine
from lockstep.data import Batch
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.models.quantisation import Scales, input_scales
from lockstep.recipes.order import steps_per_epoch
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.weights import checkpoint
from lockstep.weights.formats.lockstep_files import read_scales

BATCH_IMAGES = 32
"""Most images that pass through the model together. Scales do not depend on it, apart from
rounding."""


def calibrate(run: RunContext) -> Scales:
    """Return the scales of the inputs of all layers, from the weights that the engine holds, and
    note them for the user.

    They are found on the first `calibration_images` training images of the first epoch, cropped and
    flipped as in training, rounded up to whole batches but at most one epoch. Raises
    `DivergedError` if an input is not finite, `Interrupted` if a stop is requested meanwhile.
    """
    images = run.sets.training
    images_at_once = min(BATCH_IMAGES, run.recipe.global_batch_images)
    unmixed = {"mixup_alpha": 0.0, "cutmix_alpha": 0.0, "dropout": 0.0, "stochastic_depth": 0.0}
    plain = run.recipe.replace(global_batch_images=images_at_once, epochs=1, **unmixed)
    wanted = -(-run.recipe.calibration_images // images_at_once)
    count = min(wanted, steps_per_epoch(plain, len(images)))
    plans = islice(plan_training(images, plain, 0), count)
    with make_loader(images, run.recipe, run.execution) as loader:
        batches = _watch(run, loader.batches(plans), count)
        scales = input_scales(cast(QuantisingEngine, run.engine).calibrate(batches))
    run.notes.append(
        f"the inputs of {len(scales)} layers have {run.recipe.quantisation} scales from"
        f" {count * images_at_once} training images"
    )
    return scales


def _watch(run: RunContext, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    for batch in run.recorder.watch("calibrating", batches, count):
        stop_before_training(run.stop, "calibrating")
        yield batch


def quantise(run: RunContext, step: int) -> Scales:
    """Make the engine of a quantised recipe quantise with the scales of a step's checkpoint, and
    return them. Raises `CheckpointError` if the checkpoint has no scales that fit."""
    path = checkpoint.checkpoint_path(run.checkpoints, step) / "model.safetensors"
    scales = read_scales(checkpoint.read_metadata(path) or {}, run.recipe, path)
    if scales:
        cast(QuantisingEngine, run.engine).quantise(scales)
    return scales
