"""Every image of a source decoded once: its size, its orientation, or why it cannot be used."""

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple, TypeVar

import numpy as np

from lockstep.data.decoding.decode import check
from lockstep.data.decoding.image_formats import MISSING, readable_formats
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation
from lockstep.data.images import Images, Names, Progress, Quarantined, read_file
from lockstep.data.listing import Listing, list_images
from lockstep.data.sources import FOLDER, QUARANTINE, Source, find_store_folder
from lockstep.system.crc import compute_crc
from lockstep.system.machine import cores
from lockstep.system.regular_files import explain_failure, is_failure

Result = TypeVar("Result")
LEFT_OUT = f"left out by {QUARANTINE}: "
"""The beginning of the reason of an image that a quarantine leaves out."""
FAILURES = {"None", "MemoryError", *map(os.strerror, errno.errorcode)}
"""Reasons that the system gives."""


class Facts(NamedTuple):
    """Facts about images that decoding gives."""

    times: np.ndarray
    """uint32: the times of image files; empty for other formats."""
    orientations: np.ndarray
    """uint8: EXIF orientations."""
    checksums: np.ndarray
    """uint32: the CRC-32C of the bytes of each image."""
    bad: dict[int, str]
    """The reasons of bad images, by their numbers."""


def list_and_inspect(
    source: Source, quarantine: Mapping[str, str], progress: Progress
) -> tuple[Listing, Facts]:
    """Return the images of a source as `list_images` does, with lengths, heights and widths, and
    the facts about them."""
    if source.format == FOLDER or find_store_folder(source.root / source.files[0]) is None:
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
    parts = [rows[:0]]
    orientations = [np.zeros(0, np.uint8)]
    checksums = [np.zeros(0, np.uint32)]
    reasons: dict[int, str] = {}
    first = 0
    for part, facts in inspected:
        parts.append(part)
        orientations.append(facts.orientations)
        checksums.append(facts.checksums)
        for i, reason in facts.bad.items():
            reasons[first + i] = reason
        first += len(part)
    every = np.concatenate(parts)
    numbers = np.empty(len(rows), np.int64)
    numbers[np.lexsort((rows["offset"], rows["file"]))] = np.lexsort(
        (every["offset"], every["file"])
    )[: len(rows)]  # those of `NO_FILE` are sorted last
    bad = {}
    for i, number in enumerate(numbers.tolist()):
        if number in reasons:
            bad[i] = reasons[number]
    orientation = np.concatenate(orientations)[numbers]
    return Facts(np.zeros(0, np.uint32), orientation, np.concatenate(checksums)[numbers], bad)


def inspect_images(images: Images, progress: Progress) -> Facts:
    """Decode all images, fill in their heights, widths and lengths, and return the facts.

    Raises `DataError` if the system fails to read an image: that is no property of the image.
    """
    rows = images.rows
    are_files = not images.source.files
    are_objects = images.source.format == FOLDER and images.is_stored
    times = np.zeros(len(rows) if are_files else 0, np.uint32)
    orientations = np.full(len(rows), UPRIGHT, np.uint8)
    checksums = np.zeros(len(rows), np.uint32)
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
                height, width = _measure(data)
            except OSError as error:
                if is_failure(error):
                    raise images.explain_failure(i, error) from None
                bad[i] = explain_failure(error)
            except ValueError as error:
                if isinstance(error.__context__, MemoryError):
                    full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                    raise images.explain_failure(i, full) from None
                bad[i] = str(error)
            else:
                rows[["length", "height", "width"]][i] = (len(data), height, width)
                orientations[i] = read_orientation(data)
                checksums[i] = compute_crc(data)
        return some.stop

    run_in_ranges(inspect, len(rows), lambda done: progress(done, len(rows)))
    return Facts(times, orientations, checksums, bad)


def _measure(data: bytes) -> tuple[int, int]:
    """Return height and width of an image. Raises `ValueError` if it cannot be used."""
    height, width = check(data)
    if max(height, width) > np.iinfo(np.uint16).max:
        raise ValueError(f"{width} x {height} pixels are too many")
    return height, width


def is_usable(source: Source, bad: Quarantined, since: int) -> bool:
    """Return whether an image that an index left out may be usable by now: its file was missing, or
    was written after `since`, in nanoseconds; or what decodes it was installed.

    Indexes of older versions also left out what the system failed to read.
    """
    if bad.reason.startswith(LEFT_OUT):
        return False
    if any(bad.reason == MISSING.get(format) for format in readable_formats()):
        return True
    has_failed = bad.reason in FAILURES
    folder, _, file = bad.file.partition("/")
    if source.files:
        return has_failed
    if folder.startswith(".") or "/" in file:
        return False  # this module never wrote it
    path = f"{source.root}/{bad.file}"
    try:
        # The time of the last change also shows a file that was put in place with an old time.
        if not has_failed and os.stat(path).st_ctime_ns <= since:  # noqa: PTH116 - as in `path`
            return False
        _measure(read_file(path)[0])
    except OSError as error:
        return is_failure(error) or explain_failure(error) != bad.reason
    except ValueError:
        return False
    return True


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
