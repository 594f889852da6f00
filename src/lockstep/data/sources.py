"""Where the images of a split are, and their storage format."""

import json
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lockstep.data.decoding.image_formats import is_image_name
from lockstep.system.errors import DataError
from lockstep.system.files import user_cache
from lockstep.system.regular_files import (
    ANY_SIZE,
    RECORDS,
    is_failure,
    open_regular,
    read_regular_text,
)
from lockstep.system.strict_json import is_count, parsed

_URL = re.compile(r"(s3|gs|az|https?)://?(?=[^/])")
FOLDER = "folder"
ALIASES = {"train": ("train",), "val": ("val", "validation")}
"""The splits, and the words for them in names of files and folders."""
_NUMBERED = re.compile(r"-(\d{5,})-of-(\d{5,})(?:\.\w+)?$")
IS_OF: dict[str, Callable[[str], bool]] = {
    "recordio": lambda name: name.endswith(".rec"),
    "tfrecord": lambda name: (
        name.endswith((".tfrecord", ".tfrecords"))
        or re.search(r"-\d{5}-of-\d{5}$", name) is not None
    ),
    "webdataset": lambda name: name.endswith(".tar"),
}
"""Whether a name in lower case is that of a file of a format, for each format."""
FORMATS = (FOLDER, *IS_OF)
QUARANTINE = "quarantine.json"
"""The images to leave out, next to class folders or files: {"images": {"class/image" or "file@first
byte": reason}}."""
CLASSES = "classes.txt"
"""A file next to files that store only numbers as labels: the names of the classes, one on each
line, class 0 first."""
LABELS = "label.labels.txt"
"""The same list, as TensorFlow Datasets writes it next to its TFRecords."""
CACHE = ".lockstep"
"""The folder of Lockstep's own files next to images."""
UNFINISHED = Path(CACHE) / "pack.unfinished"
"""A file in a folder to which a data set is being written, until the data set is complete."""
FINISHED = Path(CACHE) / "pack.finished"
"""A file with a line of JSON for each written file: the lengths, by name, of this file and of those
that describe it."""
BUNDLE = ".lockstep-objects"
"""A file in a class folder whose images are objects of a store: it stands for them in one file."""
STORE_FILES = (".store.json", ".listing.lock", ".parts")
"""The files of a folder that stands for an object store, besides those of the data set: the list of
objects, a lock, and the folder of what processes have fetched."""
STORES = "stores"
"""The folder of the user's cache in which folders stand for object stores."""
MEMBERS = f"{BUNDLE}.jsonl"
"""A file next to a bundle with a line for each object of the class folder, in the order of their
names: its name in the folder, its size in bytes and its ETag."""
DALI_INDEXES = "idx"
"""The folder of DALI's indexes next to TFRecord files."""


_COMPRESSIONS = {
    b"\x1f\x8b\x08": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd"),
    b"\x04\x22\x4d\x18": ("LZ4", "unlz4"),
    b"PK\x03\x04": ("ZIP", "unzip"),
    **dict.fromkeys((b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"), ("zlib", "zlib-flate -uncompress")),
}
"""By the first bytes of a file: its compression, and the command that unpacks it."""
BEGIN_BYTES = max(map(len, _COMPRESSIONS))
_PACKED_TAR = re.compile(r"\.t(?:gz|bz2?|xz|zst)$", re.IGNORECASE)
_PACKED = re.compile(r"\.(?:gz|bz2|xz|zst|lz4|zip|zz|zlib)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The images of a split."""

    format: str
    """One of `FORMATS`."""
    root: Path
    """The folder to which names of files are relative."""
    files: tuple[str, ...] = ()
    """The files that hold the images, in order. Empty for a folder, where every image is a file; in
    a folder of an object store, the bundle of each class folder."""
    split: str = ""
    """The split whose files in `root` these are; empty if all files are."""

    @property
    def title(self) -> str:
        """The name of the source in messages."""
        root = name_folder(self.root)
        if self.format == FOLDER:
            return root
        return f"{root}/{self.files[0]}{' ...' if len(self.files) > 1 else ''}"


def name_folder(folder: Path) -> str:
    """Return how a folder is named in messages: its path, or the URL that it stands for."""
    for root in (folder, *folder.parents[:2]):
        url = read_store_field(root, "url")
        if url is not None:
            return f"{url}{str(folder).removeprefix(str(root))}"
    return str(folder)


def find_store_folder(path: Path) -> Path | None:
    """Return the folder at or above a path that stands for an object store; None if there is none.

    Its list of objects decides what is requested, and from which address, and its cache is emptied.
    Therefore only a folder that was made for an address in this user's cache stands for a store.
    The same files elsewhere, such as in someone's data set or behind a link, are ordinary files.
    """
    stores = user_cache() / STORES
    for folder in (path, *path.parents[:3]):
        with suppress(OSError):
            if folder.parent.samefile(stores) and not folder.is_symlink():
                return folder
    return None


def read_store_field(folder: Path, name: str) -> str | None:
    """Return a field of the list of objects in a folder that stands for a store: the store's `url`,
    or the `address` that commands name. None in other folders."""
    if find_store_folder(folder) != folder:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(read_regular_text(folder / STORE_FILES[0], RECORDS))[name])
    return None


def find_split(data: Path, split: str) -> Source:
    """Return the source of "train" or "val" in a data set: a folder of that name, or files with
    that word in their names.

    Raises `DataError` if there is none, if a numbered file is missing, if there are two formats, or
    if the data set was not completely written.
    """
    require_folder(data, f"; expected {_layouts(data, split)}")
    for alias in ALIASES[split]:
        if (data / alias).is_dir():
            return find_source(data / alias)
    source = _make_source(data, find_files(data, split), split)
    if source is None:
        refuse_compressed(data, split)
        photos = _list_photos(data)
        if photos:
            raise DataError(
                f"{data} has {split} images outside of class folders ({shorten_list(photos, 3)});"
                f" expected {data}/<class>/<image>. Put the images of each class in a folder; if"
                f" {data} is itself one class, name the folder around it: {data.parent}"
            )
        raise DataError(f"{data} has no {split} images; expected {_layouts(data, split)}")
    return source


def find_source(root: Path) -> Source:
    """Return the source of all images in a folder: class folders, or files that hold many images.

    Raises `DataError` as `find_split` does.
    """
    require_folder(root, f"; expected images in {root}/<class>/<image>")
    _check_written(root)
    folders, files = list_visible(root)
    if len(folders) == 1:
        from lockstep.data.forms import refuse_form

        refuse_form(root)
    if set(folders) - {DALI_INDEXES}:
        if find_store_folder(root) is None:
            return Source(FOLDER, root)
        bundles = [f"{folder}/{BUNDLE}" for folder in folders]
        return Source(FOLDER, root, tuple(name for name in bundles if (root / name).is_file()))
    source = _make_source(root, files, "")
    if source is None:
        refuse_compressed(root)
    return source or Source(FOLDER, root)


def find_url(path: str | Path) -> str | None:
    """Return the URL of an object store, or of files of a web server, that a path stands for; None
    if it is a path of this machine. `Path` makes one slash of two.

    >>> find_url(Path("s3://bucket/images")), find_url("images")
    ('s3://bucket/images', None)
    """
    text = os.fspath(path)
    scheme = _URL.match(text)
    return None if scheme is None else f"{scheme[1]}://{text[scheme.end() :].rstrip('/')}"


def name_data(folder: Path) -> str:
    """Return how a data set is named in another command: the address that a folder stands for, or
    the folder's absolute path."""
    return read_store_field(folder, "address") or str(folder.resolve())


def require_folder(path: Path, purpose: str) -> None:
    """Raise `DataError` if a path is no folder of this machine. `purpose` ends the message."""
    if path.is_dir():
        return
    if find_url(path) is not None:  # not printed: it may have a password
        raise DataError(
            "this command does not read object stores and web servers; expected a folder of this"
            " machine. Copy the data set to a disk first"
        )
    if path.is_file():
        from lockstep.data.forms import refuse_form

        refuse_form(path)
        raise DataError(
            f"{path} is a file; expected a folder. Give its folder, or unpack an archive first"
        )
    raise DataError(f"there is no folder {path}{purpose}")


def holds_split(data: Path, split: str) -> bool:
    """Return whether there is a folder or a file of this split, complete or not."""
    if not data.is_dir():
        return False
    return any((data / alias).is_dir() for alias in ALIASES[split]) or bool(find_files(data, split))


def find_sources(data: Path) -> dict[str, Source]:
    """Return the sources of a data set by split; for a folder without splits, its source under an
    empty name.

    Raises `DataError` as `find_split` does.
    """
    sources = {split: find_split(data, split) for split in ALIASES if holds_split(data, split)}
    return sources or {"": find_source(data)}


def list_unread(data: Path, source: Source) -> list[str]:
    """Return what lies in a data set next to the images of a source, looks as if it held more of
    them, and is not read: another folder or files of the split, or images next to files of a
    storage format."""
    folders = list_visible(data)[0]
    for split, aliases in ALIASES.items():
        if source.root.parent == data and source.root.name in aliases:
            others = [name for name in folders if name in aliases and name != source.root.name]
            if split == "train" or not holds_split(data, "train"):
                others += [QUARANTINE] * (data / QUARANTINE).is_file()
                read = {"test", *chain.from_iterable(ALIASES.values())}
                others += [
                    name for name in folders if name not in read and _holds_photos(data / name)
                ]
            return others + find_files(data, aliases[0])
    stored = [split for split in ALIASES if find_files(data, split)]
    is_first = source.split in ("", *stored[:1])  # the same images are next to every split
    if is_first and source.root == data and source.format != FOLDER:
        return _list_photos(data)
    return []


def _holds_photos(folder: Path) -> bool:
    """Return whether files of a folder, or of a folder in it, are named as images. One that cannot
    be read does not count: nothing is missing from what is read."""
    try:
        inside = [folder / name for name in list_visible(folder)[0]]
        return any(map(_list_photos, [folder, *inside]))
    except OSError:
        return False


def _list_photos(folder: Path) -> list[str]:
    """Return the names of the files of a folder that are named as images."""
    return [name for name in list_visible(folder)[1] if Path(name).suffix and is_image_name(name)]


def _layouts(data: Path, split: str) -> str:
    word = ALIASES[split][-1]
    own = f"{data}/<class>/<image>, " if split == "train" else ""
    return (
        f"{own}{data}/{split}/<class>/<image>, {data}/{split}.rec, {data}/{word}-00000-of-00001 or"
        f" {data}/{split}-000000.tar"
    )


def find_files(data: Path, split: str) -> list[str]:
    """Return the names of the files of any format that hold images of a split."""
    return [name for name in _find_named(data, split) if group_by_format([name])]


def _find_named(data: Path, split: str) -> list[str]:
    word = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(ALIASES[split])})(?:[^a-z]|$)", re.IGNORECASE)
    _, files = list_visible(data)
    return [name for name in files if word.search(name)]


def explain_compression(path: Path, begin: bytes) -> str:
    """Return how to unpack a file with these first bytes; "" if it is not compressed."""
    for magic, (name, command) in _COMPRESSIONS.items():
        if begin.startswith(magic):
            target = path.with_name(unpack_name(path.name))
            if target == path:
                target = path.with_name(f"unpacked-{path.name}")
            words = f"{command} < {shlex.quote(str(path))} > {shlex.quote(str(target))}"
            if name == "ZIP":
                words = f"unzip {shlex.quote(str(path))} -d {shlex.quote(str(target))}"
            return (
                f"it is compressed with {name}, and images in it cannot be read by offset. Unpack"
                f" it and remove it: {words}"
            )
    return ""


def unpack_name(name: str) -> str:
    """Return the name of a compressed file when it is unpacked."""
    return _PACKED.sub("", _PACKED_TAR.sub(".tar", name))


def refuse_compressed(root: Path, split: str = "") -> None:
    """Raise `DataError` if a folder must be packed first, or has a compressed file of a format, or
    an archive, of a split or of any."""
    from lockstep.data.forms import refuse_form

    refuse_form(root)
    for name in _find_named(root, split) if split else list_visible(root)[1]:
        if group_by_format([unpack_name(name)]) or name.lower().endswith(".zip"):
            with open_regular(root / name, ANY_SIZE) as file:
                reason = explain_compression(root / name, file.read(BEGIN_BYTES))
            if reason:
                raise DataError(f"{root / name}: {reason}")


def list_visible(root: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of folders and of files that do not begin with a dot."""
    folders = []
    files = []
    with os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                if is_folder(entry):
                    folders.append(entry.name)
                elif is_file(entry):
                    files.append(entry.name)
    return sorted(folders), sorted(files)


def group_by_format(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of files by the storage format that they are of, if any."""
    groups: dict[str, tuple[str, ...]] = {}
    for format, is_of in IS_OF.items():
        groups[format] = tuple(name for name in names if is_of(name.lower()))
    return {format: files for format, files in groups.items() if files}


def _make_source(root: Path, names: list[str], split: str) -> Source | None:
    by_format = group_by_format(names)
    if not by_format:
        return None
    if len(by_format) > 1:
        examples = ", ".join(f"{files[0]} ({format})" for format, files in by_format.items())
        raise DataError(
            f"{root} holds images in more than one format: {examples}. Put each format in a"
            " separate folder"
        )
    [(format, files)] = by_format.items()
    _check_written(root)
    check_complete(root, files)
    from lockstep.data.forms import refuse_pointers

    refuse_pointers(root / name for name in files)
    _check_lengths(root, files)
    return Source(format, root, files, split)


def _check_written(root: Path) -> None:
    """Raise `DataError` if a data set is not completely written: its part would look like a smaller
    data set."""
    for folder in (root, root.parent):
        if (folder / UNFINISHED).exists():
            raise DataError(
                f"{folder} is not complete: lockstep data pack is writing to it, or was"
                " interrupted. Run the same command again"
            )


def check_complete(root: Path, files: tuple[str, ...]) -> None:
    """Raise `DataError` if one of the files numbered `-i-of-n` is missing."""
    present: dict[tuple[str, int], set[int]] = {}
    for name in files:
        number = _NUMBERED.search(name)
        if number is not None:
            present.setdefault((name[: number.start()], int(number[2])), set()).add(int(number[1]))
    for (prefix, count), numbers in present.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            names = [f"{prefix}-{i:05d}-of-{count:05d}" for i in missing]
            raise DataError(
                f"{root} lacks {len(missing)} of {count} files: {shorten_list(names, 3)}. Put them"
                " back"
            )


def shorten_list(names: list[str], most: int) -> str:
    """Return the first names of a list, comma-separated.

    >>> shorten_list(["a", "b", "c"], 2)
    'a, b ...'
    """
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def read_lengths(root: Path) -> dict[str, dict[str, int]]:
    """Return the recorded lengths of each file that was written to a folder, and of the files that
    describe it."""
    notes: dict[str, dict[str, int]] = {}
    with suppress(FileNotFoundError):
        for line in read_regular_text(root / FINISHED, RECORDS, errors="replace").split("\n"):
            with suppress(ValueError):  # an empty or incomplete line
                lengths = parsed(line)
                if isinstance(lengths, dict) and all(map(is_count, lengths.values())):
                    notes[next(iter(lengths), "")] = lengths
    return notes


def _check_lengths(root: Path, files: tuple[str, ...]) -> None:
    """Raise `DataError` if a file lost its end: the rest would look like a smaller data set."""
    notes = read_lengths(root)
    for name in files:
        length = (root / name).stat().st_size
        written = notes.get(name, {}).get(name, 0)
        if length < written:
            raise DataError(
                f"{root / name} has only {length} of the {written} bytes that were written. Restore"
                " it, or run the command that wrote it again (lockstep data pack). If this length"
                f" is intended, remove {root / FINISHED}"
            )


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one. A looping link is not.

    Raises `OSError` if the system fails to look: a class would vanish with its folder.
    """
    return _ask(entry.is_dir)


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file or a link to one. Raises `OSError` as `is_folder` does."""
    return _ask(entry.is_file)


def _ask(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError as error:
        if is_failure(error):
            raise
        return False
