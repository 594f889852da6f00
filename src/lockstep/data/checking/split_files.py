"""Where the images of a split are, and what the split holds; as much as possible if loaders refuse
it."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path, PurePosixPath

import numpy as np

from lockstep.data import sources
from lockstep.data.checking.findings import FLAT, KINDS, Finding, Split
from lockstep.data.checking.near_duplicates import HASHES
from lockstep.data.class_folders import (
    EMPTY_CLASS,
    NEIGHBOUR,
    NESTED_FOLDER,
    Skipped,
    read_class_folder,
)
from lockstep.data.containers import NO_LABEL
from lockstep.data.decoding.image_formats import FORMAT_OF
from lockstep.data.forms import refuse_form
from lockstep.data.images import ROW, Names, Quarantined
from lockstep.data.index import list_skipped, read_quarantine
from lockstep.data.listing import Listing, list_images, read_classes
from lockstep.data.sources import Source
from lockstep.data.stored_files import StoredFile
from lockstep.system.errors import DataError
from lockstep.system.text import format_count

TOO_LARGE = re.compile(r"are too many|decompression bomb", re.IGNORECASE)
_NO_CLASS = re.compile(
    r"its label is|expected the number of a class|it has \d+ (images and )?\d* ?labels"
)
"""Parts of the messages of the format modules about labels."""
_SERIAL = re.compile(r"^(.*[-_.])(\d{5,})(\.(?:tar|rec|tfrecords?))$")
"""Names of numbered files that do not have the number of files."""
_INCOMPLETE = {
    *("compressed", "missing-shard", "refused"),
    *("two-formats", "unfinished", "unreadable-file"),
}
"""Kinds of problems of a split that may hold images that are not listed."""
SHOWN = 5
Problem = tuple[str, str, str]
"""Kind, place and detail of a problem that is not about one image of a listing."""
ImageProblem = tuple[int, str, str]
"""Number of an image in the listing, and kind and detail of its problem."""


def split_sources(data: Path) -> list[tuple[str, Source, list[Problem]]]:
    """Return name, source and problems of every split; or of the folder itself, with an empty
    name."""
    sources.require_folder(data, " to examine")
    refuse_form(data)
    splits = []
    for split in sources.ALIASES:
        examined = _find_split(data, split)
        if examined is not None:
            splits.append((split, *examined))
    if splits:
        return splits
    folders, files = _list_visible(data)
    if folders or any(_looks_stored(name) for name in files):
        source, problems = _examine_source(lambda: sources.find_source(data), data, files, "")
        if source.files:
            problems += _list_unread(data, source, source.files[0])
        return [("", source, problems)]
    sources.refuse_compressed(data)
    raise DataError(
        f"{data} holds no images; expected a data set with {data}/train and {data}/val, or files"
        " with these words in their names, or one folder of images"
    )


def _find_split(data: Path, split: str) -> tuple[Source, list[Problem]] | None:
    def find() -> Source:
        return sources.find_split(data, split)

    for alias in sources.ALIASES[split]:
        if (data / alias).is_dir():
            _, files = _list_visible(data / alias)
            source, problems = _examine_source(find, data / alias, files, "")
            return source, problems + _list_unread(data, source, f"{alias}/")
    names = sources.find_files(data, split)
    if not names:
        return None
    source, problems = _examine_source(find, data, names, split)
    return source, problems + _list_unread(data, source, names[0])


def _list_unread(data: Path, source: Source, read: str) -> list[Problem]:
    """Return what lies next to the images and is not read."""
    detail = f"not read, because {read} is read"
    return [(NEIGHBOUR, name, detail) for name in sources.list_unread(data, source)]


def _examine_source(
    find: Callable[[], Source], root: Path, names: list[str], split: str
) -> tuple[Source, list[Problem]]:
    """Return the source that `find` finds, or as much of it as can be examined. A source without a
    format holds nothing."""
    try:
        source = find()
    except (DataError, OSError) as error:
        groups = sources.group_by_format(names)
        if any((folder / sources.UNFINISHED).exists() for folder in (root, root.parent)):
            kind = "unfinished"
        elif len(groups) == 1:
            [(format, files)] = groups.items()
            problem = ("missing-shard", ".", describe_error(error))
            return Source(format, root, files, split), [problem]
        else:
            kind = "two-formats" if groups else "unreadable-file"
        return Source("", root), [(kind, ".", describe_error(error))]
    return source, _gaps(source.files)


def _looks_stored(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in FORMAT_OF or bool(sources.group_by_format([name]))


def _list_visible(root: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of folders, and of everything else."""
    folders: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if sources.is_folder(entry) else others).append(entry.name)
    except OSError:  # the listing of the images reports it
        return [], []
    return sorted(folders), sorted(others)


def _gaps(files: Iterable[str]) -> list[Problem]:
    """Return the gaps among numbered files whose names do not have the number of files."""
    present: dict[tuple[str, str], dict[int, int]] = {}
    for name in files:
        serial = _SERIAL.match(name)
        if serial is not None:
            present.setdefault((serial[1], serial[3]), {})[int(serial[2])] = len(serial[2])
    problems = []
    for (before, after), digits in present.items():
        width = max(digits.values())
        first = min(digits)
        last = max(digits)
        # Only the first few: a number may be a date.
        missing = islice((i for i in range(first, last) if i not in digits), SHOWN + 1)
        names = [f"{before}{i:0{width}d}{after}" for i in missing]
        if names:
            count = last - first + 1 - len(digits)
            detail = f"{count} missing: {sources.shorten_list(names, SHOWN)}"
            problems.append(("missing-shard", names[0], detail))
    return problems


def describe_error(error: Exception) -> str:
    """Return the message of an error; for a system error without the name of the file."""
    return str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)


class Part:
    """A split while it is examined."""

    def __init__(self, name: str, source: Source, problems: list[Problem]) -> None:
        self.name = name
        self.source = source
        self.format = source.format
        self.listing, self.listed, more = _list_source(source)
        self.problems = problems + more
        """The problems that are not about one image of the listing."""
        if any(kind == "flat" for kind, _, _ in more):
            self.format = FLAT
        elif source.format:
            self.problems += _list_skipped(self.listing)
        for bad in self.listing.damaged:
            self.problems.append((_find_kind(bad.reason), bad.file, bad.reason))
        self.image_problems: list[ImageProblem] = []
        count = len(self.listing.rows)
        self.kept = np.arange(count)
        """The numbers of the images that no quarantine leaves out."""
        self.left_out = 0
        self.unmatched: set[str] = set()
        """The places in the quarantine where the split has no image."""
        self.total_bytes = 0
        self.hashes = np.zeros((count, 2), np.uint64)
        self.looks = np.zeros((count, HASHES), np.uint64)
        """The hashes of what images show."""
        self.sound = np.zeros(count, bool)
        """Which images have no error by themselves; only these are compared with each other."""

    def place(self, number: int) -> str:
        """Return where an image is in the data set."""
        return "/".join(filter(None, (self.name, self.listing.place(number))))

    def leave_out(self) -> None:
        """Remove the images that the quarantine leaves out, and their problems."""
        try:
            quarantine = read_quarantine(self.source)
        except (DataError, OSError) as error:
            self.problems.append(("bad-quarantine", sources.QUARANTINE, describe_error(error)))
            return
        if not quarantine:
            return
        left_out = [i for i in range(len(self.kept)) if self.listing.place(i) in quarantine]
        if _INCOMPLETE.isdisjoint(kind for kind, _, _ in self.problems):
            self.unmatched = quarantine.keys() - map(self.listing.place, left_out)
        known = set()
        for problem in self.problems:
            kind, place, _ = problem
            if KINDS[kind].of_image and place in quarantine:
                known.add(problem)
                self.unmatched.discard(place)
                self.left_out += 1
        self.problems = [problem for problem in self.problems if problem not in known]
        out = set(left_out)
        self.image_problems = [row for row in self.image_problems if row[0] not in out]
        self.kept = np.delete(self.kept, left_out)
        self.left_out += len(left_out)

    def findings(self) -> Iterator[Finding]:
        """Yield the problems that are not about one image, then those of images, by image."""
        for kind, place, detail in self.problems:
            yield Finding(kind, self.name, place, "", detail)
        for i, kind, detail in sorted(self.image_problems, key=lambda problem: problem[0]):
            yield Finding(kind, self.name, self.listing.place(i), self.listing.name(i), detail)

    def summary(self) -> Split:
        """Return the summary of the split for the report."""
        return Split(
            self.name,
            self.format,
            self.source.root,
            images=len(self.kept),
            classes=len(self.listing.classes),
            total_bytes=self.total_bytes,
            left_out=self.left_out,
        )


def _list_skipped(listing: Listing) -> list[Problem]:
    """Return what is in class folders or tars and not an image of a class."""
    root = listing.source.root
    details = {
        EMPTY_CLASS: "no images",
        NESTED_FOLDER: f"expected images in {root}/<class>/<image>",
    }
    problems = []
    for kind, place, amount in list_skipped(listing):
        detail = details.get(kind, "left out") if amount == 1 else f"and {amount - 1} more"
        problems.append((kind, place, detail))
    return problems


def _list_source(source: Source) -> tuple[Listing, int | None, list[Problem]]:
    """Return what a source holds, the number of listed classes, and why loaders refuse the source.

    The number is the length of the `classes.txt` next to the source; None if there is none or it
    does not apply.
    """
    if not source.format:
        return _make_listing(source), None, []
    classes = None
    try:
        classes = read_classes(source)
        listing = list_images(source)
        return listing, len(listing.classes) if listing.classes == classes else None, []
    except (DataError, OSError, ValueError, OverflowError) as error:
        if source.format == sources.FOLDER:
            listing, problems = _list_folder(source)
            classes = None  # the list is only for classes that are numbers
        else:
            listing, problems = _list_files(source)
        # `check_labels` finds labels outside the list.
        count = None
        if classes is not None and are_numbers(listing.classes):
            count = len(classes)
        if not problems and (count is None or len(listing.classes) <= count):
            problems = [("refused", ".", describe_error(error))]
        return listing, count, problems


def are_numbers(classes: tuple[str, ...]) -> bool:
    """Return whether the names of the classes are only their numbers."""
    return classes == tuple(map(str, range(len(classes))))


def _make_listing(
    source: Source,
    names: Sequence[bytes] = (),
    labels: Sequence[int] = (),
    classes: tuple[str, ...] = (),
    damaged: Iterable[Quarantined] = (),
    skipped: Iterable[Skipped] = (),
) -> Listing:
    rows = np.zeros(len(names), ROW)
    rows["label"] = labels or 0
    return Listing(
        source,
        rows,
        Names.of(names),
        classes,
        numbered=are_numbers(classes),
        damaged=tuple(damaged),
        skipped=tuple(skipped),
    )


def _list_folder(source: Source) -> tuple[Listing, list[Problem]]:
    """Return the images of a folder that `list_images` refuses, and the problems of the folder."""
    root = source.root
    folders, files = _list_visible(root)
    if not folders:
        images = [name for name in files if name not in (sources.QUARANTINE, sources.CLASSES)]
        if not images:
            return _make_listing(source), [("no-images", ".", "the folder is empty")]
        problem = ("flat", ".", f"{format_count(len(images), 'file')} and no class folders")
        return _make_listing(source, list(map(os.fsencode, images))), [problem]
    names: list[bytes] = []
    labels: list[int] = []
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    for label, folder in enumerate(folders):
        try:
            contents = read_class_folder(root, folder)
        except OSError as error:
            problems.append(("unreadable-file", folder, describe_error(error)))
            continue
        names += [os.fsencode(f"{folder}/{name}") for name in contents.files]
        labels += [label] * len(contents.files)
        skipped += contents.skipped
    return _make_listing(source, names, labels, tuple(folders), skipped=skipped), problems


def _list_files(source: Source) -> tuple[Listing, list[Problem]]:
    """Return the images of files that `list_images` refuses, and the problems of the files."""
    files: list[StoredFile] = []
    problems: list[Problem] = []
    for number, path in enumerate(source.files):
        files.append(StoredFile())
        try:
            for _ in files[-1].fill(source, number):
                pass
        except (ValueError, OSError) as error:
            kind = "compressed" if "it is compressed" in str(error) else "unreadable-file"
            problems.append((kind, path, describe_error(error)))
    class_of = {}
    for folder in chain.from_iterable(file.folders for file in files):
        class_of[folder] = folder.rpartition("/")[2]
    classes = tuple(sorted(set(class_of.values())))
    numbers_of = {name: i for i, name in enumerate(classes)}
    positions = {folder: numbers_of[name] for folder, name in class_of.items()}
    stored = np.concatenate([np.zeros(0, ROW), *chain.from_iterable(file.rows for file in files)])
    numbers = int((stored["label"] >= 0).sum())
    if classes and numbers:
        detail = f"{format_count(numbers, 'image')} with a number, {len(stored) - numbers} a folder"
        problems.append(("mixed-labels", ".", detail))
        classes = ()
        stored["label"] = NO_LABEL
    elif classes:
        stored = np.concatenate([*chain.from_iterable(file.list_rows(positions) for file in files)])
    else:
        classes = tuple(map(str, range(int(stored["label"].max(initial=-1)) + 1)))
    listing = _make_listing(
        source,
        list(chain.from_iterable(file.names for file in files)),
        classes=classes,
        damaged=chain.from_iterable(file.damaged for file in files),
        skipped=chain.from_iterable(file.tally.entries() for file in files),
    )
    listing.rows[:] = stored
    return listing, problems


def _find_kind(reason: str) -> str:
    """Return the kind of finding for damage of a file."""
    if reason == os.strerror(errno.ELOOP):
        return "unreadable"
    if "its label is missing" in reason:
        return "missing-label"
    if _NO_CLASS.search(reason):
        return "label-out-of-range"
    return "too-large" if TOO_LARGE.search(reason) else "bad-record"
