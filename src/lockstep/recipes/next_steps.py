"""When an image is read next: a function of (seed, epoch, position), as the order is."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from lockstep.recipes.epoch_order import Permutation, order_samples
from lockstep.recipes.order import steps_per_epoch, unit_positions
from lockstep.recipes.recipe import Recipe

NEVER = 2**31 - 1
"""Stands for the next step of an image that has none, as far as is known."""


def foresee_steps(
    recipe: Recipe,
    images: int,
    *,
    labels: np.ndarray | None = None,
    shards: np.ndarray | None = None,
    rank: int = 0,
    ranks: int = 1,
    parts: int = 1,
) -> Callable[[int], np.ndarray]:
    """Return a function of a step: for each image the first step from this one on, in its epoch and
    the next one, in which the rank reads it, int32 [images]; `NEVER` if there is none.

    The arguments are those of `training_plans`. An image that an epoch has several times counts
    only where it has it last. Nothing is known of an order that has no array ("permuted").
    """
    step_images = recipe.global_batch_images
    per_epoch = steps_per_epoch(recipe, images)
    own_units = range(rank * parts, (rank + 1) * parts)
    own = np.concatenate([unit_positions(unit, ranks * parts, step_images) for unit in own_units])

    @lru_cache(maxsize=2)
    def list_steps(epoch: int) -> np.ndarray:
        steps = np.full(images, NEVER, np.int32)
        if epoch == recipe.epochs:
            return steps
        order = order_samples(recipe, epoch, images, labels, shards)
        if not isinstance(order, Permutation):
            for step in range(per_epoch):
                steps[order[step * step_images + own]] = epoch * per_epoch + step
        return steps

    def list_next_steps(step: int) -> np.ndarray:
        epoch = step // per_epoch
        steps = list_steps(epoch)
        return np.minimum(np.where(steps >= step, steps, NEVER), list_steps(epoch + 1))

    return list_next_steps
