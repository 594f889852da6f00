"""Checks that need no decoding: labels, classes, counts, and the files next to the images."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.data.checking.split_files import SHOWN, Part, Problem, are_numbers, describe_error
from lockstep.data.containers import Damage, recordio
from lockstep.data.containers.places import Places
from lockstep.data.sources import CLASSES, FOLDER, QUARANTINE, shorten_list
from lockstep.system.regular_files import RECORDS, read_regular
from lockstep.system.text import format_count

IMAGENET = {"train": 1_281_167, "val": 50_000}
"""The number of images in ImageNet."""
_SYNSET = re.compile(r"n\d{8}")
_NUMBER = slice(8, 16)
"""The bytes of RecordIO's header that hold the number of the image."""


def check_labels(part: Part, logits: int | None, known: int | None) -> int | None:
    """Compare the labels of a split with the number of classes, and return this number.

    `known` is the number that the previous split returned, or None.
    """
    count = len(part.listing.classes)
    labels = part.listing.rows["label"]
    present = np.unique(labels).tolist()
    if not (count and present):
        return known
    limits = [number for number in (logits, part.listed) if number is not None]
    limit = min(limits, default=None)
    expected = limit or known or len(present)
    if part.format != FOLDER and present[0] > 0 and present[-1] == expected:
        detail = f"labels are {present[0]} to {expected}; expected 0 to {expected - 1}"
        part.problems.append(("labels-from-1", ".", detail))
        return expected
    if limit is None or count <= limit:
        return count
    reason = f"{CLASSES} has {limit} lines"
    if limit == logits:
        reason = f"the model has {format_count(logits, 'output')}"
    beyond = np.flatnonzero(labels >= limit).tolist()
    # If a few images have labels far from the others, the images are wrong. Classes without a gap
    # are real classes.
    if part.format == FOLDER or not beyond or len(present) == present[-1] + 1:
        part.problems.append(
            ("too-many-classes", ".", f"{count} classes, {len(beyond)} images outside; {reason}")
        )
    else:
        part.image_problems += [
            (i, "label-out-of-range", f"its label is {labels[i]}; {reason}") for i in beyond
        ]
    return count


def check_classes(train: Part, val: Part) -> None:
    """Compare the classes as `list_images` does for val: by name, or by number without names."""
    shifted = any(kind == "labels-from-1" for part in (train, val) for kind, _, _ in part.problems)
    if shifted or not (train.listing.classes and val.listing.classes):
        return
    classes = train.listing.classes
    own = val.listing.classes
    if are_numbers(own):
        own = classes + own[len(classes) :]
    val_classes = _find_used(val, own)
    unknown = [name for name in val_classes if name not in classes]
    missing = [name for name in _find_used(train, classes) if name not in val_classes]
    for kind, names in (("unknown-classes", unknown), ("classes-without-val", missing)):
        if names:
            detail = f"{format_count(len(names), 'class')}: {shorten_list(names, SHOWN)}"
            val.problems.append((kind, ".", detail))


def _find_used(part: Part, classes: tuple[str, ...]) -> list[str]:
    """Return the names of the classes that have images."""
    wrong = [i for i, _, _ in part.image_problems]
    labels = np.unique(np.delete(part.listing.rows["label"], wrong))
    return [classes[label] for label in labels.tolist()]


def check_quarantines(parts: Sequence[Part]) -> None:
    """Report what a quarantine names and no split has: splits in one folder share the file."""
    places: dict[Path, set[str]] = {}
    for part in parts:
        root = part.source.root
        places[root] = places.get(root, part.unmatched) & part.unmatched
    for part in parts:
        for place in sorted(places.pop(part.source.root, ())):
            part.problems.append(("not-left-out", place, f"{QUARANTINE} names it"))


def check_count(part: Part) -> None:
    """Compare the number of images with ImageNet's, if the classes look like ImageNet's."""
    classes = part.listing.classes
    is_imagenet = len(classes) == 1000 and all(map(_SYNSET.fullmatch, classes))
    if not is_imagenet or part.name not in IMAGENET:
        return
    count = len(part.listing.rows) + len(part.listing.damaged)
    if count != IMAGENET[part.name]:
        part.problems.append(
            ("image-count", ".", f"{count:,} images; ImageNet has {IMAGENET[part.name]:,}")
        )


def check_files(part: Part) -> None:
    """Check the contents of each file of a storage format, and the files next to it."""
    files = part.source.files
    damaged = Counter(bad.file.rpartition("@")[0] for bad in part.listing.damaged)
    counts = np.bincount(part.listing.rows["file"], minlength=len(files))
    counts += [damaged[file] for file in files]
    refused = {place for _, place, _ in part.problems}
    for file, count in zip(files, counts.tolist(), strict=True):
        if not count and file not in refused:
            part.problems.append(("no-images", file, "no image in it"))
    if part.format == "tfrecord":
        # The count of NVIDIA's reader, in the TensorFlow ConvNets of DeepLearningExamples. Lengths
        # that differ by one are fine: not every total can be divided equally.
        total = int(counts.sum())
        counted = int(counts[0]) * (len(files) - 1) + int(counts[-1])
        if abs(counted - total) > max(len(files), total // 100):
            part.problems.append(
                ("unequal-shards", ".", f"{total} images; the reader would count {counted}")
            )
    if part.format == "recordio":
        for file in files:
            part.problems += _check_records(part.source.root / file, damaged[file])


def _check_records(path: Path, damaged: int) -> list[Problem]:
    """Return how the `.idx` and `.lst` of a `.rec` file differ from it, if they do."""
    problems: list[Problem] = []
    index = path.with_suffix(".idx")
    names = path.with_suffix(".lst")
    try:
        numbers, damage = _read_numbers(Places(path))
        lines = recordio.read_index(index) if index.is_file() else None
        faults = [] if lines is None else _check_index(lines, numbers, damage)
        if faults:
            more = f" ({len(faults)} problems in all)" if len(faults) > 1 else ""
            problems.append(("idx", index.name, faults[0] + more))
    except (OSError, ValueError) as error:
        problems.append(("idx", index.name, describe_error(error)))
        return problems
    if names.is_file() and not damaged:
        rows = sum(bool(line.strip()) for line in read_regular(names, RECORDS).split(b"\n"))
        if rows != len(numbers):
            counts = f"{format_count(rows, 'line')}, {format_count(len(numbers), 'record')}"
            problems.append(("lst", names.name, counts))
    return problems


def _read_numbers(file: Places) -> tuple[dict[int, int], list[Damage]]:
    """Return the number of the image of every record, by the record's offset; and the damage."""
    numbers = {}
    damage = []
    for record in recordio.records(file):
        if isinstance(record, Damage):
            damage.append(record)
            continue
        begin, end = record.spans[0]
        header = file.read(begin, min(end - begin, _NUMBER.stop))
        numbers[record.offset] = int.from_bytes(header[_NUMBER], "little")
    return numbers, damage


def _check_index(
    lines: list[tuple[int, int]], numbers: dict[int, int], damage: list[Damage]
) -> list[str]:
    """Return the problems of the lines of an `.idx`. Lines that point into damage are skipped: they
    may be right."""
    begins = np.array([stretch.begin for stretch in damage], np.int64)
    problems = []
    sound = 0
    before = -1
    for row, (number, offset) in enumerate(lines, 1):
        stretch = int(np.searchsorted(begins, offset, "right")) - 1 if damage else -1
        if stretch >= 0 and offset < damage[stretch].end:
            continue
        sound += 1
        if offset not in numbers:
            problems.append(f"line {row}: no record begins at byte {offset}")
        elif numbers[offset] != number:
            problems.append(
                f"line {row} has number {number}, but the record at byte {offset} has"
                f" {numbers[offset]}"
            )
        elif offset <= before:
            problems.append(f"line {row}: byte {offset} comes after byte {before}")
        before = offset
    if sound != len(numbers):
        problems.insert(0, f"{format_count(sound, 'line')}, {format_count(len(numbers), 'record')}")
    return problems
