"""Where the images of a split are, and in which storage format."""

import errno
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.system.errors import DataError

FOLDER = "folder"
ALIASES = {"train": ("train",), "val": ("val", "validation")}
"""The splits, and the words that mean them in names of files and folders."""
_NUMBERED = re.compile(r"-(\d{5,})-of-(\d{5,})(?:\.\w+)?$")
IS_OF: dict[str, Callable[[str], bool]] = {
    "recordio": lambda name: name.endswith(".rec"),
    "tfrecord": lambda name: name.endswith((".tfrecord", ".tfrecords")) or re.search(r"-\d{5}-of-\d{5}$", name) is not None,
    "webdataset": lambda name: name.endswith(".tar"),
}
"""By which names the files of a format are known."""
FORMATS = (FOLDER, *IS_OF)
UNFINISHED = Path(".lockstep") / "pack.unfinished"
"""In a folder to which a data set is being written, until all of it is there."""
FINISHED = Path(".lockstep") / "pack.finished"
"""Has a line of JSON for each file that was written: lengths by name, of it and of those that go with it."""
_DALI_INDEXES = "idx"
"""The folder of DALI's indexes beside TFRecord files."""


@dataclass(frozen=True)
class Source:
    """The images of a split."""

    format: str
    """One of `FORMATS`."""
    root: Path
    """What names of files are relative to."""
    files: tuple[str, ...] = ()
    """The files that hold the images, in order; none for a folder, where every image is a file."""
    split: str = ""
    """Which of the files in `root`; empty if all."""

    @property
    def named(self) -> str:
        """How messages name it."""
        return str(self.root) if self.format == FOLDER else f"{self.root}/{self.files[0]}" + " ..." * (len(self.files) > 1)


def find_split(data: Path, split: str) -> Source:
    """Return the source of "train" or "val" in a data set: a folder of that name, or files with that word in their names.

    Raises `DataError` if there is none, if a numbered file is missing, if there are two formats, or if the writing of the
    data set did not end.
    """
    if not data.is_dir():
        raise DataError(f"there is no folder {data}; expected {_layouts(data, split)}")
    for alias in ALIASES[split]:
        if (data / alias).is_dir():
            return find_source(data / alias)
    found = _of_files(data, files_of_split(data, split), split)
    if found is None:
        raise DataError(f"{data} has no {split} images; expected {_layouts(data, split)}")
    return found


def find_source(root: Path) -> Source:
    """Return the source of all images in a folder: class folders, or files that hold many images.

    Raises `DataError` as `find_split` does.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected images in {root}/<class>/<image>")
    _check_written(root)
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if is_folder(entry) and not entry.name.startswith(".")}
    if folders - {_DALI_INDEXES}:
        return Source(FOLDER, root)
    return _of_files(root, _visible_files(root), "") or Source(FOLDER, root)


def holds_split(data: Path, split: str) -> bool:
    """Tell whether there is a folder or a file of this split, be it complete or not."""
    if not data.is_dir():
        return False
    return any((data / alias).is_dir() for alias in ALIASES[split]) or bool(files_of_split(data, split))


def find_sources(data: Path) -> dict[str, Source]:
    """Return the sources of the splits of a data set, or under an empty name that of all images in a folder without splits.

    Raises `DataError` as `find_split` does.
    """
    found = {split: find_split(data, split) for split in ALIASES if holds_split(data, split)}
    return found or {"": find_source(data)}


def _layouts(data: Path, split: str) -> str:
    word = ALIASES[split][-1]
    return f"{data}/{split}/<class>/<image>, {data}/{split}.rec, {data}/{word}-00000-of-00001 or {data}/{split}-000000.tar"


def files_of_split(data: Path, split: str) -> list[str]:
    """Return the names of the files of any format that hold images of a split."""
    word = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(ALIASES[split])})(?:[^a-z]|$)", re.IGNORECASE)
    names = (name for name in _visible_files(data) if word.search(name))
    return [name for name in names if any(is_of(name) for is_of in IS_OF.values())]


def _visible_files(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_file(entry))


def _of_files(root: Path, names: Iterable[str], split: str) -> Source | None:
    names = list(names)
    by_format = {format: tuple(filter(is_of, names)) for format, is_of in IS_OF.items()}
    by_format = {format: files for format, files in by_format.items() if files}
    if not by_format:
        return None
    if len(by_format) > 1:
        examples = ", ".join(f"{files[0]} ({format})" for format, files in by_format.items())
        raise DataError(f"{root} holds images in more than one format: {examples}. Give each format a folder of its own")
    [(format, files)] = by_format.items()
    _check_written(root)
    _check_complete(root, files)
    _check_lengths(root, files)
    return Source(format, root, files, split)


def _check_written(root: Path) -> None:
    """Raise `DataError` if a data set is not all there yet: what is there of it would pass for a smaller one."""
    for folder in (root, root.parent):
        if (folder / UNFINISHED).exists():
            raise DataError(
                f"{folder} is not complete: lockstep data pack is writing to it, or was interrupted. "
                "Give the same command again"
            )


def _check_complete(root: Path, files: tuple[str, ...]) -> None:
    """Raise `DataError` if one of the files numbered `-i-of-n` is missing."""
    present: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if number := _NUMBERED.search(name):
            present.setdefault((name[: number.start()], int(number[2])), set()).add(int(number[1]))
    for (prefix, count), numbers in present.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            names = ", ".join(f"{prefix}-{i:05d}-of-{count:05d}" for i in missing[:3]) + " ..." * (len(missing) > 3)
            raise DataError(f"{root} lacks {len(missing)} of {count} files: {names}. Put them back")


def noted_lengths(root: Path) -> dict[str, dict[str, int]]:
    """Return the lengths that were noted of each file in a folder when it was written, and of those that go with it."""
    notes: dict[str, dict[str, int]] = {}
    with suppress(FileNotFoundError):
        for line in (root / FINISHED).read_text("utf-8", "replace").split("\n"):
            with suppress(ValueError):  # empty, or not written to its end
                if isinstance(lengths := json.loads(line), dict):
                    notes[next(iter(lengths), "")] = lengths
    return notes


def _check_lengths(root: Path, files: tuple[str, ...]) -> None:
    """Raise `DataError` if a file lost its end: what is left of it would pass for a smaller data set."""
    notes = noted_lengths(root)
    for name in files:
        length, written = (root / name).stat().st_size, notes.get(name, {}).get(name, 0)
        if length < written:
            raise DataError(
                f"{root / name} has {length} bytes of the {written} that were written. Restore it, or give the command "
                f"again that wrote it (lockstep data pack). If it is to be so, remove {root / FINISHED}"
            )


def class_folders(root: Path) -> list[str]:
    """Return the names of the class folders, sorted by their bytes.

    Raises `DataError` if there are none, and says how to sort a flat folder of images.
    """
    with os.scandir(root) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = sorted((entry.name for entry in visible if is_folder(entry)), key=os.fsencode)
    if not folders:
        files = sum(map(_is_file, visible))
        found = f"{files} files and no folders" if files else "nothing"
        raise DataError(
            f"{root} holds {found}; expected one folder for each class with its images inside. Sort ImageNet's "
            f"validation images into their classes with: lockstep data sort-val {shlex.quote(str(root))} --labels FILE"
        )
    return folders


def class_files(folder: Path) -> tuple[list[str], set[str]]:
    """Return the names of the images of a class folder, sorted by their bytes, and which of them are links that loop.

    Raises `DataError` if it is empty or holds a folder.
    """
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in visible if is_folder(entry))
    if folders:
        raise DataError(f"{folder} holds a folder, {folders[0]}; expected images in {folder.parent}/<class>/<image>")
    if not visible:
        raise DataError(f"{folder} is empty; expected the images of a class. Remove the folder if there are none")
    looping = {entry.name for entry in visible if entry.is_symlink() and _loops(entry)}
    return sorted((entry.name for entry in visible), key=os.fsencode), looping


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a folder or a link to one; a link that cannot be followed is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _loops(link: os.DirEntry[str]) -> bool:
    """Tell whether a link leads back to itself. One that leads nowhere may lead somewhere once a disk is mounted."""
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
