"""Runs from weights whose batch norms are folded into convolutions, as exported models have them.

Such a batch norm only adds a bias. Training would normalise with the statistics of its batch and
lose what the network has learnt. So each gets the statistics of its inputs on training images, and
a scale and a bias that undo them: no output of an evaluation changes, and a step normalises nearly
as an evaluation does. Kernels get the norm of initial ones, because the change of a kernel in front
of a batch norm is relative to its norm.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lockstep.backends.reference.norm_inputs import Moments, measure_norm_inputs
from lockstep.data.index import subset
from lockstep.data.loading.loaders import open_evaluation
from lockstep.models.architectures import Conv
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.starting_weights import Start
from lockstep.system import heartbeat

MOST_IMAGES = 32
"""Training images that are measured. In the last stage of a network at 224 px, they have 1,568
values of each channel."""
_BATCH_IMAGES = 4
_NORM = np.sqrt(2)
"""Norm of a kernel of one output channel with He's initial values (arXiv:1502.01852)."""
_ACTIVITY = "measuring batch norms"


def unfold_start(run: RunContext, start: Start) -> Start:
    """Return the weights that a new run starts from with the statistics of its training images in
    batch norms that were folded.

    Raises `Interrupted` if a stop is requested meanwhile.
    """
    moments = measure_norm_inputs(run.recipe, start.tensors, _load_images(run))
    tensors = dict(start.tensors)
    for conv in run.recipe.spec.list_convolutions():
        if conv.bn_name in start.folded_norms:
            tensors |= unfold(conv, tensors, moments[conv.bn_name], run.recipe.bn_epsilon)
    images = min(len(run.sets.training), MOST_IMAGES)
    note = (
        f"{len(start.folded_norms)} folded batch norms get the statistics of {images} training"
        " images, which changes no prediction"
    )
    return replace(start, tensors=tensors, notes=(*start.notes, note))


def _load_images(run: RunContext) -> Iterator[np.ndarray]:
    """Yield training images at equal distances in the index, as evaluation prepares them."""
    training = run.sets.training
    count = min(len(training), MOST_IMAGES)
    images = subset(training, np.arange(count) * len(training) // count)
    with open_evaluation(images, run.recipe, run.execution, _BATCH_IMAGES) as batches:
        for batch in run.recorder.watch(_ACTIVITY, batches, -(-count // _BATCH_IMAGES)):
            stop_before_training(run.stop, _ACTIVITY)
            heartbeat.note("evaluating", moved=True)
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
