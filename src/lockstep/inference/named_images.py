"""What a command line names as images: files, folders, patterns, lists, standard input, and files that hold many images."""

import errno
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.data.listing import Listing, list_images, printable
from lockstep.data.sources import IS_OF, Source, is_folder
from lockstep.inference.images import Encoded
from lockstep.system.errors import DataError

STDIN = "-"
LIST = "@"
"""The first letter of an argument that is a list: a text file with a path on each line."""
SUFFIXES = frozenset(
    ("", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
"""Files with these endings are taken from folders, and files of a storage format (`lockstep.data.sources.IS_OF`)."""
_BEGINS_AS_IMAGE = re.compile(
    rb"\xff\xd8|\x89PNG|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*|P[1-6]\s+(?:#[^\n]*\n\s*)*\d", re.DOTALL
)


@dataclass
class NamedImages:
    """Images that were named, in order; what they are is not known until they are read.

    A name that stands for nothing is in the list too: reading it raises an error that says why.
    """

    left_out: list[str] = field(default_factory=list)
    """Files in folders that are neither images nor of a storage format."""
    _parts: list[list[str | Encoded] | Listing] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __iter__(self) -> Iterator[str | Encoded]:
        for part in self._parts:
            if isinstance(part, Listing):
                yield from (_member(part, sample) for sample in range(len(part)))
            else:
                yield from part

    def add(self, argument: str, read_stdin: Callable[[], bytes]) -> None:
        """Add what an argument of the command line names. Raises `DataError` if it is a list that cannot be read."""
        if argument == STDIN:
            self._add_stdin(read_stdin())
        elif argument.startswith(LIST):
            path = Path(argument[len(LIST) :])
            try:
                with path.open("rb") as file:
                    self._add_lines(file)
            except OSError as error:
                raise DataError(f"the list {path} cannot be read: {error.strerror}") from None
        elif not os.path.lexists(argument) and glob.has_magic(argument):
            self._add_pattern(argument)
        else:
            self._add_path(argument)

    def _add_stdin(self, content: bytes) -> None:
        if _BEGINS_AS_IMAGE.match(content):
            self._append(Encoded(Path(STDIN), lambda: content))
        else:
            self._add_lines(content.splitlines())

    def _add_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if name := line.rstrip(b"\r\n"):
                self._add_path(os.fsdecode(name))

    def _add_pattern(self, pattern: str) -> None:
        found = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)  # noqa: PTH207 - it may be absolute
        if not found:
            self._add_failing(pattern, "no file matches")
        for path in found:
            if "**" not in pattern or not Path(path).is_dir():  # "**" also finds what is in the folder
                self._add_path(path)

    def _add_path(self, path: str) -> None:
        if Path(path).is_dir():
            before = len(self)
            self._add_folder(path, ())
            if len(self) == before:
                self._add_failing(path, "no images in this folder")
        elif _format(path) is not None and Path(path).is_file():
            self._add_packed(path)
        else:
            self._append(path)

    def _append(self, image: str | Encoded) -> None:
        if not self._parts or isinstance(self._parts[-1], Listing):
            self._parts.append([])
        last = self._parts[-1]
        assert isinstance(last, list)
        last.append(image)

    def _add_folder(self, folder: str, above: tuple[tuple[int, int], ...]) -> None:
        try:
            status = Path(folder).stat()
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            self._add_failing(folder, str(error.strerror))
            return
        within = (*above, (status.st_dev, status.st_ino))
        if within[-1] in above:  # a link to a folder that it is in
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                self._add_folder(entry.path, within)
            elif _format(entry.path) is not None:
                self._add_packed(entry.path)
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                self._append(entry.path)
            else:
                self.left_out.append(entry.path)

    def _add_packed(self, path: str) -> None:
        file = Path(path)
        try:
            listing = list_images(Source(str(_format(path)), file.parent, (file.name,)))
        except (DataError, OSError) as error:
            self._add_failing(path, str(error))
            return
        self._parts.append(listing)
        for damage in listing.damaged:
            self._add_failing(str(file.parent / damage.file), damage.reason)

    def _add_failing(self, name: str, why: str) -> None:
        self._append(Encoded(Path(name), _failing(why)))


def _failing(why: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise OSError(errno.EINVAL, why)

    return read


def _format(path: str) -> str | None:
    """Return the storage format of a file that holds many images, by its name; None for other files."""
    return next((format for format, is_of in IS_OF.items() if is_of(Path(path).name)), None)


def _member(listing: Listing, sample: int) -> Encoded:
    """Return an image of a file that holds many. It is called by its name in the file, else by its first byte."""
    name = printable(listing.name(sample))
    path = Path(listing.path(sample), name) if name else Path(listing.source.root, listing.place(sample))
    return Encoded(path, lambda: listing.encoded(sample))
