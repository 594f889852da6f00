"""What a command line names as images: files, folders, patterns, lists, standard input, and files
that hold many images."""

import errno
import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lockstep.data.decoding.image_formats import BEGINS_AS_IMAGE, is_image_name
from lockstep.data.images import printable
from lockstep.data.sources import IS_OF, Source, is_folder
from lockstep.inference.images import Encoded
from lockstep.system.errors import DataError
from lockstep.system.regular_files import IMAGE, NAMES, read_regular, read_stream

if TYPE_CHECKING:
    from lockstep.data.listing import Listing

STDIN = "-"
LIST = "@"
"""The first letter of an argument that is a list: a file with a path on each line, or with a NUL
after each path."""
_NUL = b"\0"
_MOST_PATH_BYTES = 4095
"""Linux opens no longer path."""
_BEGIN = 2**16
"""This many bytes of standard input decide whether it is an image."""
_SYSTEM_FOLDERS = ("/proc", "/sys")
"""Folders that hold no files, but the state of the system; links in them lead everywhere."""


@dataclass
class NamedImages:
    """Images that were named, in order; what they are is not known until they are read.

    A name that stands for nothing is in the list too: reading it raises an error that says why.
    """

    left_out: list[str] = field(default_factory=list)
    """Files in folders that are neither images nor of a storage format."""
    _parts: "list[list[str | Encoded] | Listing]" = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __iter__(self) -> Iterator[str | Encoded]:
        for part in self._parts:
            if isinstance(part, list):
                yield from part
            else:
                yield from (_describe_member(part, sample) for sample in range(len(part)))

    def are_missing(self) -> bool:
        """Return whether all images are paths at which there is nothing."""
        return all(isinstance(image, str) and not os.path.lexists(image) for image in self)

    def add(self, argument: str, stdin: BinaryIO) -> None:
        """Add what an argument of the command line names. Raises `DataError` if it is a list that
        cannot be read."""
        if argument == STDIN:
            self._add_stdin(stdin)
        elif argument.startswith(LIST):
            self._add_list_file(argument.removeprefix(LIST))
        elif not os.path.lexists(argument) and glob.has_magic(argument):
            self._add_pattern(argument)
        else:
            self._add_path(argument)

    def _add_list_file(self, path: str) -> None:
        try:
            content = read_regular(path, NAMES)
        except OSError as error:
            reason = str(error.strerror)
            if "pipe" in reason:
                reason += f"; send its paths to standard input: {STDIN}"
            raise DataError(f"the list {path} cannot be read: {reason}") from None
        self._add_list(path, content)

    def _add_stdin(self, stdin: BinaryIO) -> None:
        begin = stdin.read(_BEGIN)
        is_image = BEGINS_AS_IMAGE.match(begin) is not None
        try:
            content = read_stream(stdin, IMAGE if is_image else NAMES, begin)
        except OSError as error:
            raise DataError(f"standard input cannot be read: {error.strerror}") from None
        if is_image:
            self._append(Encoded(Path(STDIN), lambda: content))
        else:
            self._add_list("standard input", content)

    def _add_list(self, source: str, content: bytes) -> None:
        """Add the paths in a list. One that no file can have is added as an image that fails, by
        the number of its line."""
        # `find -print0` ends every path with a NUL. A line may hold one by mistake, but the last
        # one then has a newline.
        separator, unit = (_NUL, "path") if content.endswith(_NUL) else (b"\n", "line")
        for number, line in enumerate(_split_list(content, separator), start=1):
            name = line if separator == _NUL else line.rstrip(b"\r")
            if not name:
                continue
            why = ""
            if _NUL in name:
                why = "the line contains a NUL; expected one after every path, also the last,"
                why += " as find -print0 writes them"
            elif len(name) > _MOST_PATH_BYTES:
                why = f"the path has {len(name):,} bytes"
                why += f"; expected at most {_MOST_PATH_BYTES:,}"
            if why:
                self._add_failing(f"{source}, {unit} {number}", why)
            else:
                self._add_path(os.fsdecode(name))

    def _add_pattern(self, pattern: str) -> None:
        paths = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)  # noqa: PTH207
        if not paths:
            self._add_failing(pattern, "no file matches")
        for path in paths:
            # "**" also finds what is in a folder.
            if "**" not in pattern or not Path(path).is_dir():
                self._add_path(path)

    def _add_path(self, path: str) -> None:
        if os.path.isdir(path):  # noqa: PTH112 - Path's raises for names that are too long
            before = len(self)
            self._add_folder(path, ())
            if len(self) == before:
                self._add_failing(path, "no images in this folder")
        elif _find_format(path) is not None and os.path.isfile(path):  # noqa: PTH113
            self._add_packed(path)
        else:
            self._append(path)

    def _append(self, image: str | Encoded) -> None:
        if not self._parts or not isinstance(self._parts[-1], list):
            self._parts.append([])
        last = self._parts[-1]
        assert isinstance(last, list)
        last.append(image)

    def _add_folder(self, folder: str, above: tuple[tuple[int, int], ...]) -> None:
        try:
            status = Path(folder).stat()
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            self._add_failing(folder, str(error.strerror))
            return
        if status.st_dev in _list_system_devices():
            self._add_failing(
                folder,
                f"a system folder ({' or '.join(_SYSTEM_FOLDERS)}), which has no images",
            )
            return
        within = (*above, (status.st_dev, status.st_ino))
        if within[-1] in above:  # a link to a folder that it is in
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                self._add_folder(entry.path, within)
            elif _find_format(entry.path) is not None:
                self._add_packed(entry.path)
            elif is_image_name(entry.name):
                self._append(entry.path)
            else:
                self.left_out.append(entry.path)

    def _add_packed(self, path: str) -> None:
        from lockstep.data.listing import list_images

        file = Path(path)
        try:
            listing = list_images(Source(str(_find_format(path)), file.parent, (file.name,)))
        except DataError as error:
            self._add_failing(path, str(error))
            return
        except OSError as error:
            self._add_failing(path, str(error.strerror))
            return
        self._parts.append(listing)
        for damage in listing.damaged:
            self._add_failing(str(file.parent / damage.file), damage.reason)

    def _add_failing(self, name: str, why: str) -> None:
        self._append(Encoded(Path(name), _raise_when_read(why)))


def _split_list(content: bytes, separator: bytes) -> Iterator[bytes]:
    """Yield the parts of a content one after the other, since a list of all takes several times its
    memory."""
    begin = 0
    while begin < len(content):
        end = content.find(separator, begin)
        if end < 0:
            end = len(content)
        yield content[begin:end]
        begin = end + 1


@cache
def _list_system_devices() -> frozenset[int]:
    """Return the numbers of the file systems of `_SYSTEM_FOLDERS`."""
    return frozenset(
        Path(folder).stat().st_dev for folder in _SYSTEM_FOLDERS if Path(folder).is_mount()
    )


def _raise_when_read(why: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise OSError(errno.EINVAL, why)

    return read


def _find_format(path: str) -> str | None:
    """Return the storage format of a file that holds many images, by its name; None for other
    files."""
    name = Path(path).name
    return next((format for format, is_of in IS_OF.items() if is_of(name)), None)


def _describe_member(listing: "Listing", sample: int) -> Encoded:
    """Return an image of a file that holds many. It is called by its name in the file, else by its
    first byte."""
    name = printable(listing.name(sample))
    if name:
        path = Path(listing.path(sample), name)
    else:
        path = Path(listing.source.root, listing.place(sample))
    return Encoded(path, lambda: listing.read_encoded(sample))
