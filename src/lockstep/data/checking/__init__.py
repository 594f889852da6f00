"""The check of a data set: in one pass, it finds everything that would stop a training run or spoil
its result.

A problem of the data does not raise an error here. It becomes a `Finding`, and the rest of the data
is still examined.
"""

import warnings
from pathlib import Path

from lockstep.data.checking.findings import KINDS, Finding, Report
from lockstep.data.checking.images import (
    check_blank,
    check_usable,
    compare_images,
    compare_photos,
    inspect_images,
)
from lockstep.data.checking.labels import (
    check_classes,
    check_count,
    check_files,
    check_labels,
    check_quarantines,
)
from lockstep.data.checking.split_files import Part, split_sources
from lockstep.data.images import Progress, add_up
from lockstep.data.split import choose_share

__all__ = ["KINDS", "Finding", "Report", "examine"]


def examine(
    data: Path,
    *,
    logits: int | None = None,
    smallest: int = 32,
    share: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Decode every image of a data set, or of one folder of images, and return all problems.

    `logits` is the number of the model's outputs; labels must be below it. Without it, labels are
    compared only with the data. An image is tiny if its shorter side has fewer than `smallest`
    pixels. `share` is held out if there are no validation images; None: as by a run's default.
    `progress` is called with the number of images done and of all images. Images that a
    quarantine leaves out are not examined. Raises `DataError` if there is no such folder, or if
    nothing in it looks like images.
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
    check_quarantines(parts)
    advance = add_up(progress, sum(len(part.kept) for part in parts))
    # Pillow warns about large and odd images. The filters are set here because they are per
    # process, not per thread.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            inspect_images(part, smallest, advance)
        compare_images(parts, choose_share(data) if share is None else share)
        if len(parts) == 2:
            compare_photos(*parts)
    findings: list[Finding] = []
    for part in parts:
        check_usable(part)
        check_blank(part)
        findings += part.findings()
    return Report(data, tuple(part.summary() for part in parts), tuple(findings))
