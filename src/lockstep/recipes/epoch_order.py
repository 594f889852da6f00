"""Which images an epoch has, and in which order: pure functions of (seed, epoch)."""

from typing import Protocol

import numpy as np

from lockstep.recipes.philox import Purpose, draw, draw_keys, uniform
from lockstep.recipes.recipe import Recipe
from lockstep.system.errors import RecipeError

_ROUNDS = 8
_LEAST_BITS = 2
"""The least number of bits of half a number. A smaller domain has few permutations."""


class SampleOrder(Protocol):
    """The samples of an epoch by their position: an array, or computed on demand."""

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
            'order "windowed" needs images in shards, but here every image is a file.'
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

    A step has the same samples as in the samplers of DeiT, torchvision and timm, where copies
    follow each other and are dealt out to the ranks. Here all first copies of a step come first,
    then all second ones, and so on, which keeps most copies in different units.
    """
    places = np.arange(len(order))
    by_copy = np.lexsort((places % copies, places // step_images))
    return order[by_copy // copies]


def draw_by_class(sampling: str, seed: int, epoch: int, labels: np.ndarray) -> np.ndarray:
    """Return the samples of an epoch, sorted by class: int64 [images].

    `labels` are integers [images]. A class has its share of the images (`_share_places`). Within
    the class, no image comes again before all of them have come equally often. Different ones
    come once more in each epoch.
    """
    counts = np.bincount(labels)
    places = np.zeros(len(counts), np.int64)
    present = np.flatnonzero(counts)
    places[present] = _share_places(sampling, seed, epoch, counts[present])
    keys = draw_keys(seed, Purpose.CLASS_IMAGE, len(labels), epoch=epoch)
    by_class = np.lexsort((keys, labels))

    first_of_class = np.cumsum(counts) - counts
    first_place = np.cumsum(places) - places
    classes = np.repeat(np.arange(len(counts)), places)
    number_in_class = np.arange(len(labels)) - first_place[classes]
    return by_class[first_of_class[classes] + number_in_class % counts[classes]]


def _share_places(sampling: str, seed: int, epoch: int, counts: np.ndarray) -> np.ndarray:
    """Return the images that each class has in an epoch: int64 [classes], as many as `counts`
    together.

    The shares are those of `sampling`, rounded up or down: the classes, in random order, are laid
    along a line of all images, and a class has the whole numbers on its part of the line, which
    begins at random. So the mean over epochs is the exact share (systematic sampling).
    """
    weights = np.ones(len(counts)) if sampling == "balanced" else np.sqrt(counts)
    images = int(counts.sum())
    keys = draw_keys(seed, Purpose.CLASS_SHARE, len(counts), epoch=epoch)
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(weights[order])
    ends *= images / ends[-1]
    ends[-1] = images
    start = uniform(draw(seed, Purpose.CLASS_SHARE, 0, 1, epoch=epoch, attempt=1))[0, 0]
    places = np.empty(len(counts), np.int64)
    places[order] = np.diff(np.floor(ends + start), prepend=0.0)
    return places


class Permutation:
    """A permutation of 0 to count - 1, which is a function of (seed, epoch), computed position by
    position, without an array of all positions.

    It is a Feistel network (Luby and Rackoff, 1988) on numbers of an even number of bits. A result
    that is not below `count` is the next input until one is ("cycle walking", Black and Rogaway,
    2002); for 4 images or more that takes fewer than four turns on average. The function of a round
    adds the round's key and mixes the bits as SplitMix64 does (Steele, Lea and Flood, 2014).
    """

    def __init__(self, seed: int, epoch: int, count: int) -> None:
        self._count = count
        self._half = np.uint64(max(_LEAST_BITS, -(-(count - 1).bit_length() // 2)))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys = draw(seed, Purpose.PERMUTATION, 0, _ROUNDS // 4, epoch=epoch).reshape(-1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return what is at some positions: int64, with the shape of `positions`."""
        values = self._permute(np.asarray(positions).astype(np.uint64))
        while (outside := values >= self._count).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        left = values >> self._half
        right = values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return right << self._half | left


def _mix(values: np.ndarray) -> np.ndarray:
    """Return uint64 values in which every bit depends on all bits of its input."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
