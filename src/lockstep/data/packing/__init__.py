"""Write a data set in another storage format: the same images in the same order, byte for byte
unless they are resized. Bad images are left out.

Every file has a temporary name until it is complete. After an interruption, a pack with the same
arguments resumes after the last complete image.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lockstep.data.class_folders import KINDS, check_layout
from lockstep.data.forms import COMPRESSED, TABLE, Form, find_form
from lockstep.data.images import Progress, Quarantined, add_up
from lockstep.data.packing.pack_writer import write_split
from lockstep.data.packing.splits import Packing, Split, check_class_names, identify, list_splits
from lockstep.data.packing.stream import LeftOut
from lockstep.data.packing.tables import Columns, write_tables
from lockstep.data.packing.target import (
    check_is_own,
    explain_full_disk,
    lock_target,
    write_classes,
)
from lockstep.data.sources import CACHE, CLASSES, FOLDER, FORMATS
from lockstep.system.errors import DataError
from lockstep.system.machine import cores

__all__ = ["Columns", "Packing", "pack"]

_USUAL = Columns()


def _ignore(split: str, bad: Quarantined) -> None:
    """Ignore images that are left out."""


def pack(
    source: Path,
    target: Path,
    packing: Packing,
    progress: Progress | None = None,
    left_out: LeftOut = _ignore,
    columns: Columns = _USUAL,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Write the images of `source`, a data set or a folder of images, to the folder `target`;
    return counts of images. `columns` says how tables and lists are read.

    `classes.txt` is written next to the images. Images in a quarantine are not written. Neither are
    looping links, files of other kinds, and images that are truncated or over budget: `left_out` is
    called with the split and each of them. `note` is called with a line on images without a label.
    The order stays, except that an image folder sorts images by class. `progress` is called with
    the number of images done and of all images. Raises `DataError` if class folders are empty or
    hold folders, or if the target holds something else.
    """
    if packing.format not in FORMATS:
        raise DataError(
            f"{packing.format} is not a storage format; choose one of {', '.join(FORMATS)}"
        )
    form = find_form(source)
    if form is not None:
        return _pack_form(form, target, packing, progress, left_out, columns, note)
    if columns != _USUAL:
        raise DataError(
            f"{source} is not a table or a list; leave out --image, --label and --images"
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
    with (
        explain_full_disk(target),
        lock_target(target, identify(splits, packing), states),
        ThreadPoolExecutor(packing.workers or cores()) as pool,
    ):
        write_classes(target / CLASSES, splits[0].listing.classes)
        for split in splits:
            split.faults.load()
            write_split(split, target, packing, pool, advance)
    for split in splits:
        for bad in _list_left_out(split):
            left_out(split.name, bad)
    return {
        split.name or "images": len(split.listing) - len(split.faults.reasons()) for split in splits
    }


def _pack_form(
    form: Form,
    target: Path,
    packing: Packing,
    progress: Progress | None,
    left_out: LeftOut,
    columns: Columns,
    note: Callable[[str], None],
) -> dict[str, int]:
    """Write a data set whose images are not ranges of bytes: as tars that are the target, or from
    which the target is then written."""
    check_is_own(target)
    stage = target / CACHE / "stage"
    is_direct = False
    with explain_full_disk(target):
        if form.kind == COMPRESSED:
            from lockstep.data.packing.compressed import unpack

            unpack(form, stage)
        else:
            if form.kind == TABLE:
                from lockstep.data.packing.parquet import open_tables as open_files
            else:
                from lockstep.data.packing.lists import open_lists as open_files
            is_direct = packing == Packing("webdataset", workers=packing.workers)
            tables = open_files(form, columns.images)
            folder = target if is_direct else stage
            counts = write_tables(form, tables, columns, folder, progress, left_out, note)
    if is_direct:
        return counts
    counts = {}
    for name in ("", "test"):
        entries = {path.name for path in (stage / name).glob("[!.]*")}
        if entries - {CLASSES, "test"}:
            with _naming(stage, form.path):
                part = pack(stage / name, target / name, packing, progress, left_out)
            for split, count in part.items():
                counts[name or split] = count
    shutil.rmtree(stage)
    return counts


@contextmanager
def _naming(stage: Path, source: Path) -> Iterator[None]:
    """Name the source in errors of the folder in which it is staged."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(stage), str(source))) from None


def _list_left_out(split: Split) -> Iterator[Quarantined]:
    yield from split.listing.damaged
    for kind, place, count in split.listing.skipped:
        yield Quarantined(place, KINDS[kind][0] if count == 1 else f"{count} {KINDS[kind][1]}")
    for number, reason in split.faults.reasons().items():
        yield Quarantined(split.listing.place(number), reason)


def _check_target(split: Split, target: Path) -> None:
    check_class_names(split.listing.classes, split.format)
    root = split.listing.source.root
    holds_images = not split.name or split.listing.source.format == FOLDER
    if holds_images and target.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{target} is inside {root}, where its files would count as images; choose another"
            " folder"
        )
