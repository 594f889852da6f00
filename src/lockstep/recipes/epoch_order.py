"""Which images an epoch has, and in which order: pure functions of (seed, epoch)."""

from typing import Protocol

import numpy as np

from lockstep.recipes.class_sampling import draw_by_class
from lockstep.recipes.permutation import Permutation
from lockstep.recipes.philox import Purpose, draw_keys
from lockstep.recipes.recipe import Recipe
from lockstep.system.errors import RecipeError


class SampleOrder(Protocol):
    """The samples of an epoch by their position: an array, or computed when they are asked for."""

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at some positions: int64 [N]."""


def order_samples(
    recipe: Recipe,
    epoch: int,
    images: int,
    labels: np.ndarray | None = None,
    shards: np.ndarray | None = None,
) -> SampleOrder:
    """Return the samples of an epoch in their order: int64 [images], or a `Permutation`.

    `labels` are integers [images]; "plain" sampling does not need them. `shards` are the numbers of
    the files that hold the images, [images]; only the order "windowed" needs them.
    """
    if recipe.order == "permuted":
        permutation = Permutation(recipe.seed, epoch, images)
        if recipe.sampling == "plain" and recipe.repeated_augmentation == 1:
            return permutation
        order = permutation[np.arange(images)]
    elif recipe.order == "windowed":
        order = mix_windows(recipe, epoch, images, shards)
    else:
        order = shuffle(recipe.seed, epoch, images)
    if recipe.sampling != "plain":
        if labels is None:
            raise ValueError(f"sampling {recipe.sampling} needs the labels of the images")
        order = draw_by_class(recipe.sampling, recipe.seed, epoch, labels)[order]
    if recipe.repeated_augmentation == 1:
        return order
    return _repeat_samples(order, recipe.repeated_augmentation, recipe.global_batch_images)


def shuffle(seed: int, epoch: int, images: int) -> np.ndarray:
    """Return a random order of the images of an epoch: int64 [images], a permutation."""
    return np.argsort(draw_keys(seed, Purpose.ORDER, images, epoch=epoch), kind="stable")


def mix_windows(recipe: Recipe, epoch: int, images: int, shards: np.ndarray | None) -> np.ndarray:
    """Return the images of an epoch in the order "windowed": int64 [images], a permutation.

    Raises `RecipeError` if the images are not in shards.
    """
    if shards is None:
        raise RecipeError(
            'order "windowed" mixes the images of some shards, but here every image is a file.'
            " Write shards with lockstep data pack, or leave out --set order=windowed"
        )
    count = int(shards.max()) + 1
    places = np.empty(count, np.int64)
    shard_keys = draw_keys(recipe.seed, Purpose.SHARD_ORDER, count, epoch=epoch)
    places[np.argsort(shard_keys, kind="stable")] = np.arange(count)
    keys = draw_keys(recipe.seed, Purpose.ORDER, images, epoch=epoch)
    return np.lexsort((keys, places[shards] // recipe.window_shards))


def _repeat_samples(order: np.ndarray, copies: int, step_images: int) -> np.ndarray:
    """Return an order of equal length in which the first samples come several times: int64
    [images].

    A step has the samples that it has if copies follow each other, as in the samplers of DeiT,
    torchvision and timm. These deal the copies out to the ranks in turn. Here all first copies of a
    step come first, then all second ones, and so on, which keeps most copies in different units.
    """
    places = np.arange(len(order))
    by_copy = np.lexsort((places % copies, places // step_images))
    return order[by_copy // copies]
