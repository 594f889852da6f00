"""The data-set doctor: everything about a data set that would stop a training or spoil its result, found in one pass.

Nothing wrong with the data is an error here. It becomes a `Finding`, and whatever else can be examined still is.
"""

import warnings
from pathlib import Path

from lockstep.data.checking.findings import KINDS, Finding, Report
from lockstep.data.checking.images import check_usable, compare_images, inspect_images
from lockstep.data.checking.labels import check_classes, check_count, check_files, check_labels
from lockstep.data.checking.parts import Part, split_sources
from lockstep.data.listing import Progress

__all__ = ["KINDS", "Finding", "Report", "examine"]


def examine(data: Path, *, logits: int | None = None, smallest: int = 32, progress: Progress | None = None) -> Report:
    """Return all that is wrong with a data set, or with one folder of images, after decoding every image.

    `logits` is the number of the model's outputs, which labels must stay below; without it they are held against the data
    alone. An image is tiny if its shorter side has fewer than `smallest` pixels. `progress` is called with the images done
    and the images in all. Images that a quarantine leaves out are not examined. Raises `DataError` if there is no such
    folder, or nothing like images in it.
    """
    parts = [Part(name, source, problems) for name, source, problems in split_sources(data)]
    classes = None
    for part in parts:
        classes = check_labels(part, logits, classes)
    if len(parts) == 2:
        check_classes(*parts)
    for part in parts:
        check_count(part)
        if part.source.files:
            check_files(part)
        part.leave_out()
    total, done = sum(len(part.kept) for part in parts), 0

    def advance(images: int) -> None:
        nonlocal done
        done += images
        if progress is not None:
            progress(done, total)

    # Pillow warns of large and odd images. The filters belong to the process: threads cannot have their own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            inspect_images(part, smallest, advance)
    compare_images(parts)
    for part in parts:
        check_usable(part)
    return Report(data, tuple(part.summary() for part in parts), tuple(each for part in parts for each in part.findings()))
