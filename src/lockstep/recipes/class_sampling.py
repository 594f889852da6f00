"""How often an epoch has the images of each class: the field `sampling` of a recipe."""

import numpy as np

from lockstep.recipes.philox import Purpose, draw, draw_keys, uniform


def draw_by_class(sampling: str, seed: int, epoch: int, labels: np.ndarray) -> np.ndarray:
    """Return the samples of an epoch, sorted by class: int64 [images].

    `labels` are integers [images]. A class has its share of the images (`_share_places`). Within
    the class, no image comes again before all of them have come equally often. Those that come
    once more are others in each epoch.
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
