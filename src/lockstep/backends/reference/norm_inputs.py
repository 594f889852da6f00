"""What the batch norms of a network get as their inputs: mean and variance of every channel."""

from collections.abc import Iterable, Mapping

import numpy as np

from lockstep.backends.reference import functions as f
from lockstep.backends.reference.model import Network
from lockstep.recipes import Recipe

Array = np.ndarray
Moments = tuple[Array, Array]
"""Mean and biased variance of every channel: float64 [C] each."""


def measure_norm_inputs(
    recipe: Recipe, tensors: Mapping[str, Array], batches: Iterable[Array]
) -> dict[str, Moments]:
    """Return the moments of the inputs of every batch norm over all images, by its name.

    `batches` are images, uint8 [N, H, W, 3], one or more. They pass through the weights as in an
    evaluation, in float32.
    """
    recipe = recipe.replace(precision="fp32", loss_scaling="none")
    sums: dict[str, Array] = {}
    mean, std = (np.array(values, np.float32) for values in (recipe.mean, recipe.std))
    for images in batches:
        network = _Measuring(recipe, tensors, sums)
        network.logits(f.normalise(images.astype(np.float32), mean, std))
    moments = {}
    for name, (count, total, squares) in sums.items():
        middle = total / count
        moments[name] = middle, np.maximum(squares / count - np.square(middle), 0)
    return moments


class _Measuring(Network):
    """A pass in inference that adds what batch norms get to `sums`: by name, the number of values
    of a channel, their sum and the sum of their squares, float64 [3, C]."""

    def __init__(
        self, recipe: Recipe, tensors: Mapping[str, Array], sums: dict[str, Array]
    ) -> None:
        super().__init__(recipe, tensors, training=False)
        self._sums = sums

    def _batch_norm(self, x: Array, name: str) -> tuple[Array, f.Back]:
        values = x.reshape(-1, x.shape[3]).astype(np.float64)
        sums = np.stack(
            [np.full(x.shape[3], len(values)), values.sum(axis=0), np.square(values).sum(axis=0)]
        )
        self._sums[name] = self._sums.get(name, 0) + sums
        return super()._batch_norm(x, name)
