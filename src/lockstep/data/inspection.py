"""Every image of a source decoded once: its size, its orientation, or why it cannot be used."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import numpy as np

from lockstep.data.decoding.decode import check
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation
from lockstep.data.images import Images, Names, Progress, read_file
from lockstep.data.listing import Listing, list_images
from lockstep.data.sources import FOLDER, Source
from lockstep.data.stores.mirror import find_mirror
from lockstep.system.machine import cores

Result = TypeVar("Result")
Facts = tuple[np.ndarray, np.ndarray, dict[int, str]]
"""Times of image files (uint32, empty for other formats), EXIF orientations (uint8), and the
reasons of bad images by their numbers."""


def list_and_inspect(
    source: Source, quarantine: Mapping[str, str], progress: Progress
) -> tuple[Listing, Facts]:
    """Return the images of a source as `list_images` does, with lengths, heights and widths, and
    the facts about them."""
    if source.format == FOLDER or find_mirror(source.root / source.files[0]) is None:
        listing = list_images(source, quarantine=quarantine, progress=progress)
        return listing, inspect_images(listing, progress)
    # A store may be larger than its cache: what is listed is decoded before more is fetched.
    inspected: list[tuple[np.ndarray, Facts]] = []

    def inspect(rows: np.ndarray) -> None:
        images = Images(source, rows, Names.of(()), (), numbered=True)
        inspected.append((rows, inspect_images(images, lambda done, total: None)))

    listing = list_images(source, quarantine=quarantine, progress=progress, inspect=inspect)
    return listing, _arrange(listing.rows, inspected)


def _arrange(rows: np.ndarray, inspected: list[tuple[np.ndarray, Facts]]) -> Facts:
    """Return the facts about parts of the rows in the order of the rows."""
    parts = np.concatenate([rows[:0], *(part for part, _ in inspected)])
    places = np.empty(len(rows), np.int64)
    places[np.lexsort((parts["offset"], parts["file"]))] = np.lexsort(
        (rows["offset"], rows["file"])
    )
    orientations = np.empty(len(rows), np.uint8)
    bad: dict[int, str] = {}
    first = 0
    for part, (_, own_orientations, reasons) in inspected:
        own = places[first : first + len(part)]
        orientations[own] = own_orientations
        bad |= {int(own[i]): reason for i, reason in reasons.items()}
        first += len(part)
    return np.zeros(0, np.uint32), orientations, bad


def inspect_images(images: Images, progress: Progress) -> Facts:
    """Decode all images, fill in their heights, widths and lengths, and return the facts."""
    rows = images.rows
    are_files = not images.source.files
    are_objects = images.source.format == FOLDER and images.is_stored
    times = np.zeros(len(rows) if are_files else 0, np.uint32)
    orientations = np.full(len(rows), UPRIGHT, np.uint8)
    bad: dict[int, str] = {}

    def inspect(some: range) -> int:
        if are_objects:
            images.prefetch(np.arange(some.start, some.stop), 0)
        for i in some:
            try:
                if are_files:
                    data, times[i] = read_file(images.path(i))
                else:
                    data = images.read_encoded(i)
                height, width = check(data)
                if max(height, width) > np.iinfo(np.uint16).max:
                    raise ValueError(f"{width} x {height} pixels are too many")
            except OSError as error:
                bad[i] = str(error.strerror)
            except ValueError as error:
                bad[i] = str(error)
            else:
                rows[["length", "height", "width"]][i] = (len(data), height, width)
                orientations[i] = read_orientation(data)
        return some.stop

    run_in_ranges(inspect, len(rows), lambda done: progress(done, len(rows)))
    return times, orientations, bad


def run_in_ranges(
    work: Callable[[range], Result], count: int, finish: Callable[[Result], None]
) -> None:
    """Call `work` with consecutive ranges up to `count`, on all cores, and `finish` with each
    result, in order.

    One task for each image would take 2 GB for ImageNet. An interruption does not wait for tasks
    that have not begun.
    """
    tasks = [range(first, min(first + 64, count)) for first in range(0, count, 64)]
    # `results` is closed before the pool.
    with (
        ThreadPoolExecutor(cores()) as pool,
        closing(pool.map(work, tasks)) as results,  # type: ignore[type-var]
    ):
        for result in results:
            finish(result)
