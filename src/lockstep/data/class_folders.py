"""What a folder of class folders holds: its classes, their images, and what is neither."""

import errno
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.data import sources
from lockstep.data.decoding.image_formats import BEGINS_AS_IMAGE, is_image_name
from lockstep.system.errors import DataError
from lockstep.system.regular_files import IMAGE, open_regular
from lockstep.system.text import format_count

EMPTY_CLASS = "empty-class"
NESTED_FOLDER = "nested-folder"
HIDDEN = "hidden"
LOOSE_IMAGE = "loose-image"
STRAY_FILE = "stray-file"
CLASS_LIST = "class-list"
LINK = "link"
EXTRA_IMAGE = "extra-image"
BAD_RECORD = "bad-record"
NO_END = "no-end"
NEIGHBOUR = "neighbour"
KINDS = {
    EMPTY_CLASS: ("empty class folder", "empty class folders"),
    NESTED_FOLDER: ("folder inside a class folder", "folders inside class folders"),
    HIDDEN: ("hidden file", "hidden files"),
    LOOSE_IMAGE: ("image outside the class folders", "images outside the class folders"),
    STRAY_FILE: ("file that is not an image", "files that are not images"),
    CLASS_LIST: ("incomplete list of classes", "incomplete lists of classes"),
    LINK: ("link in a tar", "links in tars"),
    EXTRA_IMAGE: ("second image of a sample", "second images of samples"),
    BAD_RECORD: ("damaged place without an image", "damaged places without images"),
    NO_END: ("tar without its end", "tars without their ends"),
    NEIGHBOUR: ("item next to the images that are read", "items next to the images that are read"),
}
"""The kinds of what is left out, with the words for one and for many; also kinds of findings of
`lockstep data check`."""
REFUSED = (EMPTY_CLASS, NESTED_FOLDER)
"""The kinds that strict readers refuse: without them, a data set has fewer images or classes than
the folders suggest."""
_OWN_FILES = (sources.QUARANTINE, sources.CLASSES, sources.CACHE, *sources.STORE_FILES)
_BEGIN = 64
"""This many bytes of a file decide whether it begins like an image."""
_SHOWN = 5
_LISTED = 20


class Skipped(NamedTuple):
    """Something in a folder of class folders that is not an image of a class."""

    kind: str
    """One of `KINDS`."""
    place: str
    """Relative to the folder; `file/member` in a tar."""
    amount: int = 1
    """How many of the kind there are; `place` is the first of them."""


class Tally:
    """What is left out of a file that holds many images: the first of each kind one by one, and how
    many more there are."""

    def __init__(self) -> None:
        self._first: list[Skipped] = []
        self._more: dict[str, Skipped] = {}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, place: str) -> None:
        """Count something that is left out."""
        self._counts[kind] += 1
        if self._counts[kind] <= _LISTED:
            self._first.append(Skipped(kind, place))
        else:
            self._more.setdefault(kind, Skipped(kind, place))

    def entries(self) -> list[Skipped]:
        """Return what was counted."""
        more = []
        for kind, item in self._more.items():
            more.append(item._replace(amount=self._counts[kind] - _LISTED))
        return self._first + more


class ClassFolder(NamedTuple):
    """The contents of a class folder."""

    files: list[str]
    """The names of the images, sorted by their bytes."""
    looping: set[str]
    """Which of them are links that lead back to themselves."""
    skipped: list[Skipped]
    places: dict[str, tuple[int, int]]
    """By name: where an image that is an object of a store begins in the bundle, and its length.
    Empty on a disk."""


def list_class_folders(root: Path) -> list[str]:
    """Return the names of the class folders, sorted by their bytes.

    Raises `DataError` if there are none; the message says how to sort a flat folder of images.
    """
    entries = [entry for entry in _scan(root) if not entry.name.startswith(".")]
    folders = [entry.name for entry in entries if sources.is_folder(entry)]
    if not folders:
        files = sum(map(sources.is_file, entries))
        contents = f"{format_count(files, 'file')} and no folders" if files else "nothing"
        raise DataError(
            f"{root} holds {contents}; expected one folder for each class with its images inside."
            " Sort ImageNet's validation images into their classes with: lockstep data sort-val"
            f" {shlex.quote(str(root))} --labels FILE"
        )
    return folders


def list_beside_classes(root: Path) -> list[Skipped]:
    """Return what is next to class folders and not one of them, without Lockstep's own files."""
    skipped = []
    for entry in _scan(root):
        if entry.name.startswith("."):
            kind = HIDDEN
        elif sources.is_folder(entry):
            continue
        elif entry.is_symlink() and not sources.is_file(entry) and "." not in entry.name:
            kind = EMPTY_CLASS  # its folder may be on an unmounted disk
        elif sources.is_file(entry) and _begins_as_image(entry.path):
            kind = LOOSE_IMAGE
        else:
            kind = STRAY_FILE
        if entry.name not in _OWN_FILES:
            skipped.append(Skipped(kind, entry.name))
    return skipped


def read_class_folder(root: Path, name: str) -> ClassFolder:
    """Return the contents of a class folder of `root`."""
    contents = ClassFolder([], set(), [], {})
    stored = (root / name / sources.MEMBERS).is_file()
    stored = stored and sources.find_store_folder(root) is not None
    if stored:
        _sort_objects(root, name, contents)
    for entry in _scan(root / name):
        place = f"{name}/{entry.name}"
        if stored and entry.name in (sources.BUNDLE, sources.MEMBERS):
            continue
        if entry.name.startswith("."):
            contents.skipped.append(Skipped(HIDDEN, place))
        elif sources.is_folder(entry):
            contents.skipped.append(Skipped(NESTED_FOLDER, place))
        elif not is_image_name(entry.name) and not _begins_as_image(entry.path):
            contents.skipped.append(Skipped(STRAY_FILE, place))
        else:
            contents.files.append(entry.name)
            if entry.is_symlink() and _is_looping(entry):
                contents.looping.add(entry.name)
    if not contents.files:
        contents.skipped.insert(0, Skipped(EMPTY_CLASS, name))
    return contents


def _sort_objects(root: Path, name: str, contents: ClassFolder) -> None:
    """Add what a class folder of an object store holds to its contents."""
    from lockstep.data.stores.bundles import is_image, read_members

    for member in read_members(root / name):
        inner, slash, _ = member.name.partition("/")
        if is_image(member.name):
            contents.files.append(member.name)
            contents.places[member.name] = (member.begin, member.size)
            continue
        skipped = Skipped(NESTED_FOLDER if slash else STRAY_FILE, f"{name}/{inner}")
        if skipped not in contents.skipped[-1:]:
            contents.skipped.append(skipped)


def check_layout(contents: Sequence[tuple[Path, Sequence[Skipped]]]) -> None:
    """Raise `DataError` with everything in folders of class folders that strict readers refuse.

    `contents` are the folders, each with what is left out of it.
    """
    places = []
    for root, skipped in contents:
        if skipped:
            from lockstep.data.forms import refuse_form

            refuse_form(root)
        for kind, place, _ in skipped:
            if kind in REFUSED:
                places.append(f"\n  {root / place}: {KINDS[kind][0]}")
    if places:
        more = f"\n  ... and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
        raise DataError(
            f"{format_count(len(places), 'folder')} would be left out, and images or classes with"
            f" them; expected images in <class>/<image>:{''.join(places[:_LISTED])}{more}\nMove or"
            " remove them. The recipes my-images and fine-tune leave them out"
        )


def explain_no_images(root: Path, skipped: Sequence[Skipped]) -> DataError:
    """Return the error for a folder whose class folders have no images; `skipped` is what they
    hold."""
    from lockstep.data.forms import refuse_form

    refuse_form(root)
    nested = [place for kind, place, _ in skipped if kind == NESTED_FOLDER]
    within = {place.partition("/")[0] for place in nested}
    advice = "put the images of each class in a separate folder"
    if len(within) == 1:
        around = root / within.pop()
        advice = f"if the classes are the folders in {around}, name that folder instead"
    return DataError(
        f"{root} has no images in {root}/<class>/<image>; left out: {describe_skipped(skipped)};"
        f" {advice}"
    )


def describe_skipped(skipped: Sequence[Skipped]) -> str:
    """Return how much of each kind is left out, with a few places.

    >>> describe_skipped([Skipped(HIDDEN, "cat/.DS_Store"), Skipped(EMPTY_CLASS, "dog")])
    '1 empty class folder (dog), 1 hidden file (cat/.DS_Store)'
    """
    parts = []
    for kind, (one, many) in KINDS.items():
        places = []
        count = 0
        for item in skipped:
            if item.kind == kind:
                places.append(item.place)
                count += item.amount
        if places:
            shown = sources.shorten_list(places, _SHOWN)
            parts.append(f"{format_count(count, one, many)} ({shown})")
    return ", ".join(parts)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by the bytes of their names."""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: os.fsencode(entry.name))


def _begins_as_image(path: str) -> bool:
    """Return whether a file begins like an image. One that cannot be read counts as an image, so
    that the reason is reported."""
    try:
        with open_regular(path, IMAGE) as file:
            return BEGINS_AS_IMAGE.match(file.read(_BEGIN)) is not None
    except OSError:
        return True


def _is_looping(link: os.DirEntry[str]) -> bool:
    """Return whether a link leads back to itself. A link to nothing does not: its target may be on
    an unmounted disk."""
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
