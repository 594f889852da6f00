"""The scales of a quantised run's inputs, found once before its first step.

They are in the metadata of every checkpoint, whose SHA-256 is checked when it is read. So a run
resumes with the same scales, and a checkpoint alone can be evaluated and exported.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lockstep.backends import Engine, QuantisingEngine
from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import loader_of
from lockstep.models.quantisation import Scales, input_scales
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import steps_per_epoch, training_plans
from lockstep.weights import checkpoint
from lockstep.weights.formats.lockstep_files import read_scales

BATCH_IMAGES = 32
"""Most images that pass through the model together. Scales do not depend on it, apart from
rounding."""


def calibrated(
    engine: Engine,
    recipe: Recipe,
    images: Index,
    execution: Execution,
    watched: Callable[[str, Iterator[Batch], int], Iterator[Batch]],
) -> tuple[Scales, str]:
    """Return the scales of the inputs of all layers, from the weights that the engine holds, and a
    note for the user.

    They are found on the first `calibration_images` training images of the first epoch, cropped and
    flipped as in training, rounded up to whole batches but at most one epoch. `watched` gets what
    is done, the batches and their number, and returns the batches. Raises `DivergedError` if an
    input is not finite.
    """
    images_at_once = min(BATCH_IMAGES, recipe.global_batch_images)
    plain = recipe.replace(global_batch_images=images_at_once, epochs=1, mixup_alpha=0.0)
    count = min(
        -(-recipe.calibration_images // images_at_once), steps_per_epoch(plain, len(images))
    )
    plans = islice(training_plans(plain, images.sizes_for(plain), 0), count)
    with loader_of(images, recipe, execution, size=recipe.image_size) as loader:
        batches = watched("calibrating", loader.batches(plans), count)
        scales = input_scales(cast(QuantisingEngine, engine).calibrate(batches))
    found_on = count * images_at_once
    return (
        scales,
        (
            f"the inputs of {len(scales)} layers have {recipe.quantisation} scales from {found_on}"
            " training images"
        ),
    )


def about_scales(scales: Scales) -> dict[str, Any]:
    """Return the part of a checkpoint's metadata that holds scales; empty if there are none."""
    return {"scales": scales} if scales else {}


def quantise(engine: Engine, recipe: Recipe, folder: Path, step: int) -> Scales:
    """Make an engine quantise with the scales of a step's checkpoint in `folder`, and return them.

    An engine of a recipe without quantisation is left as it is, and the scales are empty. Raises
    `CheckpointError` if the checkpoint has no scales that fit.
    """
    path = checkpoint.checkpoint_path(folder, step) / "model.safetensors"
    scales = (
        read_scales(checkpoint.metadata(path) or {}, recipe, path)
        if recipe.quantisation != "none"
        else {}
    )
    if scales:
        cast(QuantisingEngine, engine).quantise(scales)
    return scales
