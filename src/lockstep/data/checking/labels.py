"""What can be told without decoding: labels, classes, counts, and the files beside the images."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from lockstep.data.checking.parts import Part, Problem, are_numbers, reason_of, shown
from lockstep.data.containers import Damage, Places, recordio
from lockstep.data.listing import CLASSES
from lockstep.data.sources import FOLDER

IMAGENET = {"train": 1_281_167, "val": 50_000}
"""How many images ImageNet has."""
_SYNSET = re.compile(r"n\d{8}")
_NUMBER = slice(8, 16)
"""Where RecordIO's header has the number of the image."""


def check_labels(part: Part, logits: int | None, known: int | None) -> int | None:
    """Hold the labels of a split against the number of classes; return that number, if `known` for the split before."""
    count = len(part.listing.classes)
    labels = part.listing.rows["label"]
    present = np.unique(labels).tolist()
    if not (count and present):
        return known
    limit = min((number for number in (logits, part.listed) if number is not None), default=None)
    expected = limit or known or len(present)
    if part.format != FOLDER and present[0] > 0 and present[-1] == expected:
        detail = f"labels are {present[0]} to {expected}; expected 0 to {expected - 1}"
        part.problems.append(("labels-from-1", ".", detail))
        return expected
    if limit is None or count <= limit:
        return count
    said = f"the model has {logits} outputs" if limit == logits else f"{CLASSES} has {limit} lines"
    beyond = np.flatnonzero(labels >= limit).tolist()
    # A few images with labels far from the others are wrong themselves; classes without a gap are classes.
    if part.format == FOLDER or not beyond or len(present) == present[-1] + 1:
        part.problems.append(("too-many-classes", ".", f"{count} classes, {len(beyond)} images beyond; {said}"))
    else:
        part.of_images += [(i, "label-out-of-range", f"its label is {labels[i]}; {said}") for i in beyond]
    return count


def check_classes(train: Part, val: Part) -> None:
    """Compare the classes as `list_images` does for val: by name, or where val has none by number."""
    shifted = any(kind == "labels-from-1" for part in (train, val) for kind, _, _ in part.problems)
    if shifted or not (train.listing.classes and val.listing.classes):
        return
    classes, own = train.listing.classes, val.listing.classes
    if are_numbers(own):
        own = classes + own[len(classes) :]
    of_train, of_val = _used(train, classes), _used(val, own)
    if unknown := [name for name in of_val if name not in classes]:
        val.problems.append(("unknown-classes", ".", f"{len(unknown)} classes: {shown(unknown)}"))
    if missing := [name for name in of_train if name not in of_val]:
        val.problems.append(("classes-without-val", ".", f"{len(missing)} classes: {shown(missing)}"))


def _used(part: Part, classes: tuple[str, ...]) -> list[str]:
    """Return the names of the classes that have images."""
    wrong = [i for i, _, _ in part.of_images]
    return [classes[label] for label in np.unique(np.delete(part.listing.rows["label"], wrong)).tolist()]


def check_count(part: Part) -> None:
    """Hold the number of images against ImageNet's, if the classes look like its."""
    classes = part.listing.classes
    if len(classes) != 1000 or not all(map(_SYNSET.fullmatch, classes)) or part.name not in IMAGENET:
        return
    count = len(part.listing.rows) + len(part.listing.damaged)
    if count != IMAGENET[part.name]:
        part.problems.append(("image-count", ".", f"{count:,} images; ImageNet has {IMAGENET[part.name]:,}"))


def check_files(part: Part) -> None:
    """Look at what each of the files of a storage format holds, and at what stands beside it."""
    files = part.source.files
    damaged = Counter(bad.file.rpartition("@")[0] for bad in part.listing.damaged)
    counts = np.bincount(part.listing.rows["file"], minlength=len(files)) + [damaged[file] for file in files]
    refused = {place for _, place, _ in part.problems}
    empty = [file for file, count in zip(files, counts.tolist(), strict=True) if not count and file not in refused]
    part.problems += [("no-images", file, "no image in it") for file in empty]
    if part.format == "tfrecord":
        # That of the TensorFlow ConvNets in DeepLearningExamples. Lengths that differ by one are as equal as can be.
        total, counted = int(counts.sum()), int(counts[0]) * (len(files) - 1) + int(counts[-1])
        if abs(counted - total) > max(len(files), total // 100):
            part.problems.append(("unequal-shards", ".", f"{total} images; it would count {counted}"))
    if part.format == "recordio":
        for file in files:
            part.problems += _beside_records(part.source.root / file, damaged[file])


def _beside_records(path: Path, damaged: int) -> list[Problem]:
    """Return how `.idx` and `.lst` differ from the `.rec` file they stand beside, where they do."""
    problems: list[Problem] = []
    index, names = path.with_suffix(".idx"), path.with_suffix(".lst")
    try:
        numbers, stretches = _numbers(Places(path))
        if index.is_file() and (wrong := _index_problems(recordio.read_index(index), numbers, stretches)):
            more = f" ({len(wrong)} such places)" if len(wrong) > 1 else ""
            problems.append(("idx", index.name, wrong[0] + more))
    except (OSError, ValueError) as error:
        problems.append(("idx", index.name, reason_of(error)))
        return problems
    if names.is_file() and not damaged:
        lines = sum(bool(line.strip()) for line in names.read_bytes().split(b"\n"))
        if lines != len(numbers):
            problems.append(("lst", names.name, f"{lines} lines, {len(numbers)} records"))
    return problems


def _numbers(file: Places) -> tuple[dict[int, int], list[Damage]]:
    """Return the image's number of every record by its offset, and the damage."""
    numbers, damage = {}, []
    for record in recordio.records(file):
        if isinstance(record, Damage):
            damage.append(record)
            continue
        begin, end = record.spans[0]
        header = file.read(begin, min(end - begin, _NUMBER.stop))
        numbers[record.offset] = int.from_bytes(header[_NUMBER], "little")
    return numbers, damage


def _index_problems(lines: list[tuple[int, int]], numbers: dict[int, int], damage: list[Damage]) -> list[str]:
    """Return what is wrong with the lines of an `.idx`; those that point into damage may be right."""
    begins = np.array([stretch.begin for stretch in damage], np.int64)
    problems, sound, before = [], 0, -1
    for row, (number, offset) in enumerate(lines, 1):
        stretch = int(np.searchsorted(begins, offset, "right")) - 1 if damage else -1
        if stretch >= 0 and offset < damage[stretch].end:
            continue
        sound += 1
        if offset not in numbers:
            problems.append(f"line {row}: no record begins at byte {offset}")
        elif numbers[offset] != number:
            problems.append(f"line {row} says {number}, the record at byte {offset} {numbers[offset]}")
        elif offset <= before:
            problems.append(f"line {row}: byte {offset} comes after {before}")
        before = offset
    if sound != len(numbers):
        problems.insert(0, f"{sound} lines, {len(numbers)} records")
    return problems
