"""What a run from given weights measures on its training images before its first step: the scales
of a quantised run's inputs, and the statistics of batch norms that are folded into convolutions.

Scales are in the metadata of every checkpoint, whose SHA-256 is checked when it is read. A run
thus resumes with the same scales, and a checkpoint alone can be evaluated and exported.

A folded batch norm, as exported models have them, only adds a bias. Training would normalise with
the statistics of its batch and lose what the network has learnt. Each therefore gets the statistics
of its inputs on training images, and a scale and a bias that undo them: no output of an evaluation
changes, and a step normalises nearly as an evaluation does. Kernels get the norm of initial ones,
because the change of a kernel in front of a batch norm is relative to its norm.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np

from lockstep.backends import QuantisingEngine
from lockstep.backends.reference.model import Moments, measure_norm_inputs
from lockstep.data import Batch
from lockstep.data.index import subset
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.models.architectures import Conv
from lockstep.models.quantisation import Scales, input_scales
from lockstep.recipes.order import steps_per_epoch
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.evaluate import watch_images
from lockstep.runs.starting_weights import Start
from lockstep.weights import checkpoint
from lockstep.weights.formats.lockstep_files import read_scales

_BATCH_IMAGES = 32
"""At most this many images pass through the model together. Scales depend on it only by
rounding."""
_MOST_NORM_IMAGES = 32
"""Training images that are measured. In the last stage of a network at 224 px, they have 1,568
values of each channel."""
_NORM_BATCH_IMAGES = 4
_NORM = np.sqrt(2)
"""Norm of a kernel of one output channel with He's initial values (arXiv:1502.01852)."""
_ACTIVITY = "measuring batch norms"


def calibrate(run: RunContext) -> Scales:
    """Return the scales of the inputs of all layers, from the weights that the engine holds, and
    note them for the user.

    They are found on the first `calibration_images` training images of the first epoch, cropped and
    flipped as in training, rounded up to whole batches but at most one epoch. Raises
    `DivergedError` if an input is not finite, `Interrupted` if a stop is requested meanwhile.
    """
    images = run.sets.training
    images_at_once = min(_BATCH_IMAGES, run.recipe.global_batch_images)
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


def unfold_start(run: RunContext, start: Start) -> Start:
    """Return the weights that a new run starts from with the statistics of its training images in
    batch norms that were folded.

    Raises `Interrupted` if a stop is requested meanwhile.
    """
    moments = measure_norm_inputs(run.recipe, start.tensors, _load_norm_images(run))
    tensors = dict(start.tensors)
    for conv in run.recipe.spec.list_convolutions():
        if conv.bn_name in start.folded_norms:
            tensors |= unfold(conv, tensors, moments[conv.bn_name], run.recipe.bn_epsilon)
    images = min(len(run.sets.training), _MOST_NORM_IMAGES)
    note = (
        f"{len(start.folded_norms)} folded batch norms get the statistics of {images} training"
        " images, which changes no prediction"
    )
    return replace(start, tensors=tensors, notes=(*start.notes, note))


def _load_norm_images(run: RunContext) -> Iterator[np.ndarray]:
    """Yield training images at equal distances in the index, as evaluation prepares them."""
    training = run.sets.training
    count = min(len(training), _MOST_NORM_IMAGES)
    images = subset(training, np.arange(count) * len(training) // count)
    opening = (images, run.recipe, run.execution, _NORM_BATCH_IMAGES)
    for batch in watch_images(run.recorder, _ACTIVITY, *opening):
        stop_before_training(run.stop, _ACTIVITY)
        yield batch.pixels[batch.labels >= 0]


def unfold(
    conv: Conv, tensors: dict[str, np.ndarray], moments: Moments, epsilon: float
) -> dict[str, np.ndarray]:
    """Return the tensors of a convolution and its folded batch norm, which compute the same.

    `moments` are those of the batch norm's inputs.
    """
    mean, variance = moments
    kernel = tensors[f"{conv.name}.weight"].astype(np.float64)
    norms = np.sqrt(np.square(kernel).sum(axis=(1, 2, 3)))
    factors = _NORM / np.where(norms > 0, norms, _NORM)
    values = {
        f"{conv.name}.weight": kernel * factors[:, None, None, None],
        f"{conv.bn_name}.weight": np.sqrt(variance + epsilon / factors**2),
        f"{conv.bn_name}.bias": tensors[f"{conv.bn_name}.bias"] + mean,
        f"{conv.bn_name}.running_mean": mean * factors,
        f"{conv.bn_name}.running_var": variance * factors**2,
    }
    return {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()}
