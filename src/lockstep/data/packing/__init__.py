"""Write a data set in another storage format: the same images in the same order, byte for byte
unless they are resized. Bad images are left out.

Every file has a temporary name until it is complete. After an interruption, a pack with the same
arguments resumes after the last complete image.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.data.class_folders import KINDS, check_layout
from lockstep.data.images import Progress, Quarantined, add_up
from lockstep.data.packing.pack_writer import write_split
from lockstep.data.packing.splits import Packing, Split, check_classes, identify, list_splits
from lockstep.data.packing.target import lock_target
from lockstep.data.sources import CLASSES, FOLDER, FORMATS
from lockstep.system.errors import DataError
from lockstep.system.files import lines, written_text
from lockstep.system.machine import cores
from lockstep.system.regular_files import RECORDS, read_regular

__all__ = ["Packing", "pack"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a user's quota, and the largest size of a file."""


def pack(
    source: Path,
    target: Path,
    packing: Packing,
    progress: Progress | None = None,
    left_out: Callable[[str, Quarantined], None] | None = None,
) -> dict[str, int]:
    """Write the images of `source`, a data set or a folder of images, to the folder `target`;
    return counts of images.

    `classes.txt` is written next to the images. Images in a quarantine are not written. Neither are
    looping links, files of other kinds, and images that are truncated or over budget: `left_out` is
    called with the split and each of them. The order stays, except that an image folder sorts
    images by class. `progress` is called with the number of images done and of all images. Raises
    `DataError` if class folders are empty or hold folders, or if the target holds something else.
    """
    if packing.format not in FORMATS:
        raise DataError(
            f"{packing.format} is not a storage format; choose one of {', '.join(FORMATS)}"
        )
    splits = list(list_splits(source, target, packing))
    check_layout([(split.listing.source.root, split.listing.skipped) for split in splits])
    total = sum(len(split.listing) for split in splits)
    if not total:
        raise DataError(f"{source} has no images")
    for split in splits:
        _check_target(split, target)
    advance = add_up(progress, total)
    states = np.concatenate([split.states for split in splits])
    try:
        with (
            lock_target(target, identify(splits, packing), states),
            ThreadPoolExecutor(packing.workers or cores()) as pool,
        ):
            _write_classes(target / CLASSES, splits[0].listing.classes)
            for split in splits:
                split.faults.load()
                write_split(split, target, packing, pool, advance)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DataError(
            f"{error.filename or target}: {error.strerror}. What is written stays in {target}, in"
            " finished and unfinished files. Free space and run the same command again, which"
            " resumes; or remove the folder"
        ) from None
    if left_out is not None:
        for split in splits:
            for bad in _list_left_out(split):
                left_out(split.name, bad)
    return {
        split.name or "images": len(split.listing) - len(split.faults.reasons()) for split in splits
    }


def _list_left_out(split: Split) -> Iterator[Quarantined]:
    yield from split.listing.damaged
    for kind, place, count in split.listing.skipped:
        yield Quarantined(place, KINDS[kind][0] if count == 1 else f"{count} {KINDS[kind][1]}")
    for number, reason in split.faults.reasons().items():
        yield Quarantined(split.listing.place(number), reason)


def _check_target(split: Split, target: Path) -> None:
    check_classes(split)
    root = split.listing.source.root
    holds_images = not split.name or split.listing.source.format == FOLDER
    if holds_images and target.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{target} is inside {root}, where its files would be taken for images; choose another"
            " folder"
        )


def _write_classes(path: Path, classes: Sequence[str]) -> None:
    text = lines(classes)
    if not path.exists() or read_regular(path, RECORDS) != text.encode("utf-8", "surrogateescape"):
        with written_text(path) as file:
            file.write(text)
