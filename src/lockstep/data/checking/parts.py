"""Where the images of a split are, and what the split holds; as much as possible if loaders refuse
it."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from lockstep.data.checking.findings import FLAT, KINDS, Finding, Split
from lockstep.data.containers import NO_LABEL, Damage
from lockstep.data.index import QUARANTINE, read_quarantine
from lockstep.data.listing import (
    CLASSES,
    MOST_BYTES,
    MOST_CLASSES,
    ROW,
    STORED,
    Listing,
    Names,
    Quarantined,
    list_images,
    read_classes,
)
from lockstep.data.sources import (
    ALIASES,
    FOLDER,
    IS_OF,
    UNFINISHED,
    Source,
    find_files,
    find_source,
    find_split,
    is_folder,
)
from lockstep.system.errors import DataError

FORMAT_OF = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".gif": "GIF", ".webp": "WEBP",
    ".ppm": "PPM", ".pgm": "PPM", ".pbm": "PPM", ".tif": "TIFF", ".tiff": "TIFF",
}  # fmt: skip
"""Pillow's name of the format, by the ending of an image's name."""
TOO_LARGE = re.compile(r"are too many|decompression bomb", re.IGNORECASE)
_NO_CLASS = re.compile(r"its label is|expected the number of a class|it has no class")
"""Parts of the messages of the format modules about labels."""
_SERIAL = re.compile(r"^(.*[-_.])(\d{5,})(\.(?:tar|rec|tfrecords?))$")
"""Names of numbered files that do not have the number of files."""
SHOWN = 5
Problem = tuple[str, str, str]
"""Kind, place and detail of a problem that is not about one image of a listing."""


def split_sources(data: Path) -> list[tuple[str, Source, list[Problem]]]:
    """Return name, source and problems of every split; or of the folder itself, with an empty name."""
    if not data.is_dir():
        raise DataError(f"there is no folder {data} to examine")
    splits = [(split, _split(data, split)) for split in ALIASES]
    found = [(split, *source) for split, source in splits if source is not None]
    if found:
        return found
    if _visible(data, folders=True) or any(_looks_stored(name) for name in _visible(data)):
        source, problems = _found(lambda: find_source(data), data, _visible(data), "")
        return [("", source, problems)]
    raise DataError(
        f"{data} holds no images; expected a data set with {data}/train and {data}/val, or files"
        " with these words in their names, or one folder of images"
    )


def _split(data: Path, split: str) -> tuple[Source, list[Problem]] | None:
    root = next((data / alias for alias in ALIASES[split] if (data / alias).is_dir()), None)
    if root is not None:
        return _found(lambda: find_split(data, split), root, _visible(root), "")
    names = find_files(data, split)
    return _found(lambda: find_split(data, split), data, names, split) if names else None


def _found(
    find: Callable[[], Source], root: Path, names: list[str], split: str
) -> tuple[Source, list[Problem]]:
    """Return the source that `find` finds, or as much of it as can be examined. A source without a
    format holds nothing."""
    try:
        source = find()
    except (DataError, OSError) as error:
        if any((folder / UNFINISHED).exists() for folder in (root, root.parent)):
            return Source("", root), [("unfinished", ".", describe_error(error))]
        by_format = _by_format(names)
        if len(by_format) != 1:
            return Source("", root), [
                ("two-formats" if by_format else "unreadable-file", ".", describe_error(error))
            ]
        [(format, files)] = by_format.items()
        return Source(format, root, files, split), [("missing-shard", ".", describe_error(error))]
    return source, _gaps(source.files)


def _by_format(names: list[str]) -> dict[str, tuple[str, ...]]:
    by_format = {format: tuple(filter(is_of, names)) for format, is_of in IS_OF.items()}
    return {format: files for format, files in by_format.items() if files}


def _looks_stored(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in FORMAT_OF or bool(_by_format([name]))


def _visible(root: Path, *, folders: bool = False) -> list[str]:
    """Return the sorted names of files, or of folders."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                each.name
                for each in entries
                if not each.name.startswith(".") and is_folder(each) == folders
            )
    except OSError:  # the listing of the images reports it
        return []


def _gaps(files: Iterable[str]) -> list[Problem]:
    """Return the gaps among numbered files whose names do not have the number of files."""
    present: dict[tuple[str, str], dict[int, int]] = {}
    for name in files:
        if serial := _SERIAL.match(name):
            present.setdefault((serial[1], serial[3]), {})[int(serial[2])] = len(serial[2])
    problems = []
    for (before, after), digits in present.items():
        width = max(digits.values())
        first = min(digits)
        last = max(digits)
        # Only the first few: a number may be a date.
        some = islice((i for i in range(first, last) if i not in digits), SHOWN + 1)
        if missing := [f"{before}{i:0{width}d}{after}" for i in some]:
            count = last - first + 1 - len(digits)
            problems.append(("missing-shard", missing[0], f"{count} missing: {shown(missing)}"))
    return problems


def shown(names: list[str]) -> str:
    """Return the first names of a list, comma-separated."""
    return ", ".join(names[:SHOWN]) + " ..." * (len(names) > SHOWN)


def describe_error(error: Exception) -> str:
    """Return the message of an error; for a system error without the name of the file."""
    return str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)


class Part:
    """A split while it is examined."""

    def __init__(self, name: str, source: Source, problems: list[Problem]) -> None:
        self.name = name
        self.source = source
        self.format = source.format
        self.listing, self.listed, more = _listing_of(source)
        self.problems = problems + more
        """The problems that are not about one image of the listing."""
        if any(kind == "flat" for kind, _, _ in more):
            self.format = FLAT
        self.problems += [
            (_kind_of_damage(bad.reason), bad.file, bad.reason) for bad in self.listing.damaged
        ]
        self.of_images: list[tuple[int, str, str]] = []
        """For each problem of an image: the image's number in the listing, the kind and the detail.
        """
        count = len(self.listing.rows)
        self.kept = np.arange(count)
        """The numbers of the images that no quarantine leaves out."""
        self.left_out = 0
        self.total_bytes = 0
        self.hashes = np.zeros((count, 2), np.uint64)
        self.sound = np.zeros(count, bool)
        """Which images have no error by themselves; only these are compared with each other."""

    def leave_out(self) -> None:
        """Remove the images that the quarantine leaves out, and their problems."""
        try:
            listed = read_quarantine(self.source)
        except (DataError, OSError) as error:
            self.problems.append(("bad-quarantine", QUARANTINE, describe_error(error)))
            return
        if not listed:
            return
        out = {i for i in range(len(self.kept)) if self.listing.place(i) in listed}
        known = [
            problem
            for problem in self.problems
            if KINDS[problem[0]].of_image and problem[1] in listed
        ]
        self.problems = [problem for problem in self.problems if problem not in known]
        self.of_images = [found for found in self.of_images if found[0] not in out]
        self.kept = np.array([i for i in range(len(self.kept)) if i not in out], np.int64)
        self.left_out = len(out) + len(known)

    def findings(self) -> Iterator[Finding]:
        """Yield the problems that are not about one image, then the problems of images, by image."""
        for kind, place, detail in self.problems:
            yield Finding(kind, self.name, place, "", detail)
        for i, kind, detail in sorted(self.of_images, key=lambda found: found[0]):
            yield Finding(kind, self.name, self.listing.place(i), self.listing.name(i), detail)

    def summary(self) -> Split:
        """Return the summary of the split for the report."""
        classes = len(self.listing.classes)
        return Split(
            self.name,
            self.format,
            self.source.root,
            len(self.kept),
            classes,
            self.total_bytes,
            self.left_out,
        )


def _listing_of(source: Source) -> tuple[Listing, int | None, list[Problem]]:
    """Return what a source holds, the number of listed classes, and why loaders refuse the source.

    The number is the length of the `classes.txt` next to the source; None if there is none or it
    does not apply.
    """
    if not source.format:
        return _listing(source, [], [], ()), None, []
    named = None
    try:
        named = read_classes(source)
        listing = list_images(source)
        return listing, len(listing.classes) if listing.classes == named else None, []
    except (DataError, OSError, ValueError, OverflowError) as error:
        listing, problems = _of_folder(source) if source.format == FOLDER else _of_files(source)
        # The list is only for classes that are numbers. `check_labels` finds labels outside it.
        listed = (
            len(named)
            if named is not None and source.format != FOLDER and are_numbers(listing.classes)
            else None
        )
        if not problems and (listed is None or len(listing.classes) <= listed):
            problems = [("refused", ".", describe_error(error))]
        return listing, listed, problems


def are_numbers(classes: tuple[str, ...]) -> bool:
    """Return whether the names of the classes are only their numbers."""
    return classes == tuple(map(str, range(len(classes))))


def _listing(
    source: Source,
    rows: list[tuple[int, ...]],
    names: list[str],
    classes: tuple[str, ...],
    damaged: Iterable[Quarantined] = (),
) -> Listing:
    names_of = Names.of(map(os.fsencode, names))
    return Listing(
        source,
        np.array(rows, ROW),
        names_of,
        classes,
        numbered=are_numbers(classes),
        damaged=tuple(damaged),
    )


def _row(label: int, offset: int = 0, file: int = 0, length: int = 0) -> tuple[int, ...]:
    return offset, file, length, label, 0, 0


def _of_folder(source: Source) -> tuple[Listing, list[Problem]]:
    """Return the images of a folder that `list_images` refuses, and the problems of the folder."""
    root = source.root
    folders = _visible(root, folders=True)
    files = _visible(root)
    if not folders:
        images = [name for name in files if name not in (QUARANTINE, CLASSES)]
        if not images:
            return _listing(source, [], [], ()), [("no-images", ".", "the folder is empty")]
        return _listing(source, [_row(0)] * len(images), images, ()), [
            ("flat", ".", f"{len(images)} files and no class folders")
        ]
    names: list[str] = []
    rows: list[tuple[int, ...]] = []
    problems: list[Problem] = []
    for label, folder in enumerate(folders):
        try:
            with os.scandir(root / folder) as entries:
                visible = {
                    each.name: is_folder(each) for each in entries if not each.name.startswith(".")
                }
        except OSError as error:
            problems.append(("unreadable-file", folder, describe_error(error)))
            continue
        if not visible:
            problems.append(("empty-class", folder, "no images"))
        problems += [
            ("nested-folder", f"{folder}/{name}", f"expected images in {root}/<class>/<image>")
            for name in sorted(visible)
            if visible[name]
        ]
        images = sorted(name for name in visible if not visible[name])
        names += [f"{folder}/{name}" for name in images]
        rows += [_row(label)] * len(images)
    return _listing(source, rows, names, tuple(folders)), problems


def _of_files(source: Source) -> tuple[Listing, list[Problem]]:
    """Return the images of files that `list_images` refuses, and the problems of the files."""
    rows: list[tuple[int, ...]] = []
    names: list[str] = []
    damaged: list[Quarantined] = []
    problems: list[Problem] = []
    labels: list[int | str] = []
    for file, path in enumerate(source.files):
        try:
            for each in STORED[source.format](source.root / path):
                if isinstance(each, Damage):
                    damaged.append(Quarantined(f"{path}@{each.begin}", each.reason))
                elif each.label > MOST_CLASSES:
                    damaged.append(
                        Quarantined(f"{path}@{each.offset}", f"its label is {each.label}")
                    )
                elif each.length > MOST_BYTES:
                    damaged.append(
                        Quarantined(f"{path}@{each.offset}", f"{each.length} bytes are too many")
                    )
                else:
                    rows.append(
                        _row(
                            NO_LABEL,
                            ~each.offset if each.in_parts else each.offset,
                            file,
                            each.length,
                        )
                    )
                    labels.append(each.class_name if each.label == NO_LABEL else each.label)
                    names.append(
                        each.name.encode(errors="replace").decode()
                    )  # JSON allows names that file systems do not
        except (ValueError, OSError) as error:
            kind = "compressed" if "the tar is compressed" in str(error) else "unreadable-file"
            problems.append((kind, path, describe_error(error)))
    folders = {label for label in labels if isinstance(label, str)}
    numbers = [label for label in labels if isinstance(label, int)]
    if folders and numbers:
        detail = (
            f"{len(numbers)} images have a number as their class, {len(labels) - len(numbers)} a"
            " folder"
        )
        return _listing(source, rows, names, (), damaged), [
            *problems,
            ("mixed-labels", ".", detail),
        ]
    classes = (
        tuple(sorted(folders)) if folders else tuple(map(str, range(max(numbers, default=-1) + 1)))
    )
    position: dict[int | str, int] = {name: i for i, name in enumerate(classes)}
    listing = _listing(source, rows, names, classes, damaged)
    listing.rows["label"] = [
        label if isinstance(label, int) else position[label] for label in labels
    ]
    return listing, problems


def _kind_of_damage(reason: str) -> str:
    if reason == os.strerror(errno.ELOOP):
        return "unreadable"
    return (
        "label-out-of-range"
        if _NO_CLASS.search(reason)
        else "too-large"
        if TOO_LARGE.search(reason)
        else "bad-record"
    )
