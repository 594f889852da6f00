"""Tars of images: WebDataset's, and tars of a folder of class folders.

In WebDataset, the members of a sample are adjacent and share a key, the name up to its first dot:
`<key>.jpg` is the image, `<key>.cls` its class as a number; `<key>.json` may have it as `label`.
Images without such a number are those of class folders: every member that is an image counts,
whatever its name, and its class is its folder.
"""

import io
import json
import re
import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import NamedTuple

from lockstep.data import class_folders
from lockstep.data.class_folders import Skipped
from lockstep.data.containers import NO_LABEL, Appended, Bytes, Damage, Sample, Stored, split_path
from lockstep.data.containers.places import Places
from lockstep.data.decoding.image_formats import BEGINS_AS_IMAGE, FORMAT_OF
from lockstep.data.stores.places import PlacesStream, open_pass
from lockstep.system.strict_json import parsed

_BLOCK = tarfile.BLOCKSIZE
_KEY = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]*)$")
_RANKS = {ending.removeprefix("."): rank for rank, ending in enumerate(FORMAT_OF)}
"""The endings of images, without their dots, and which counts first."""
_MOST_TOGETHER = 2**14
"""At most this many members are looked at together, and those that differ only in their endings."""
_ABOUT = ("cls", "json")
_MOST_ABOUT_BYTES = 2**24
"""The longest `.cls` or `.json`."""
_MAGIC = b"ustar"
_MAGIC_AT = 257
"""The magic text of a header, and its offset."""
_TYPE_AT = 156
_SIZE_AT = slice(124, 136)
_BEFORE = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
"""The types of what stands before the header that it describes: long names and attributes."""
_MOST_BEFORE = 16
_MOST_BEFORE_BYTES = 2**20
"""The most descriptions before a header, and their total length. tarfile reads them into memory."""
_EMPTY = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
_BEFORE_SIZE = _EMPTY[100:124]
_BEHIND_SIZE = _EMPTY[136:148]
_BEHIND_CHECKSUM = _EMPTY[156:]
"""The constant parts of a file's header. For the sum of all bytes, the checksum itself counts as
spaces."""
_SUM = sum(_BEFORE_SIZE + _BEHIND_SIZE + b" " * 8 + _BEHIND_CHECKSUM)
_MISSING = (
    "its label is missing: expected a number in .cls, or as label in .json, or a folder in its name"
)
_SPARSE = "a member is stored as a sparse file; write the tar without --sparse"
_BUFFER_BYTES = 2**13
_BEGIN = 64
"""This many bytes of a member decide whether it begins as an image."""
_SENSELESS = (ValueError, OverflowError, MemoryError, RecursionError)
"""What tarfile raises, in addition to its own errors, if a header has a right checksum but invalid
contents."""


def members(file: Places, start: int = 0) -> Iterator[tarfile.TarInfo | Damage]:
    """Yield the members of a tar from a header on, and the damage between them.

    Only headers have checksums. A member counts as damaged if neither another member nor the end of
    the archive follows it directly: bytes may have been added to it or lost. The members after it
    are found at any offset.
    """
    rest = _Rest(file)
    with io.BufferedReader(PlacesStream(file), _BUFFER_BYTES) as stream:
        while start < file.size:
            last, end, is_torn, reason = yield from _follow(file, stream, start)
            ended = not is_torn and rest.is_zero(end)
            if ended:
                start = file.size
            else:
                start = _next_member(file, end + 1 if is_torn or not last else last.offset_data)
            is_end = ended and end <= start and (start - end) % _BLOCK == 0
            if last is not None and (is_torn or is_end):
                yield last
                last = None
            if last is not None or not ended:
                yield Damage(end if last is None else last.offset, start, reason)


def _follow(
    file: Places, stream: "io.BufferedReader[PlacesStream]", start: int
) -> Generator[tarfile.TarInfo, None, tuple[tarfile.TarInfo | None, int, bool, str]]:
    """Yield members that follow each other from a header on, except for the last. Return this one,
    where it ends, whether the file ends within the next, and why no other follows."""
    last = None
    end = start
    reason = f"no member of a tar begins at byte {start}"
    stream.seek(start)
    try:
        has_magic = _check_header(file, start)
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while has_magic and (member := tar.next()) is not None:
                # Otherwise tarfile keeps all of them.
                tar.members.clear()  # type: ignore[attr-defined]
                if not 0 <= member.size <= file.size - member.offset_data:
                    reason = f"the file ends at byte {file.size} within {member.name}"
                    return last, end, True, reason
                if member.issparse():
                    raise ValueError(_SPARSE)
                if last is not None:
                    yield last
                last = member
                end = tar.offset
                reason = f"no member of a tar begins at byte {end}"
                has_magic = _check_header(file, end)
    except (*_SENSELESS, tarfile.TarError) as error:
        reason += f": {str(error) or type(error).__name__}"
    return last, end, False, reason


def _check_header(file: Places, offset: int) -> bool:
    """Return whether "ustar" is at its place in the header of a member, or only zeros, as in the
    oldest tars.

    The checksum is not enough: it is a plain sum, which can be right in a header that is shifted by
    a byte. Raises `ValueError` if more stands before the header than tarfile should read.
    """
    begin = offset
    for _ in range(_MOST_BEFORE):
        header = file.read(offset, max(min(_BLOCK, file.size - offset), 0))
        kind = header[_TYPE_AT : _TYPE_AT + 1]
        if kind == tarfile.GNUTYPE_SPARSE:
            raise ValueError(_SPARSE)
        if kind not in _BEFORE:
            return header[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] in (_MAGIC, bytes(len(_MAGIC)))
        length = tarfile.nti(header[_SIZE_AT])  # type: ignore[attr-defined]
        offset += _BLOCK - -length // _BLOCK * _BLOCK
        if not 0 <= length <= _MOST_BEFORE_BYTES - (offset - begin):
            break
    raise ValueError(
        f"more than {_MOST_BEFORE_BYTES} bytes or {_MOST_BEFORE} headers stand before it"
    )


class _Rest:
    """Whether only zeros follow in a file. Every byte is looked at once."""

    def __init__(self, file: Places) -> None:
        self._file = file
        self._content = 0
        """There is a byte that is not zero before this offset."""
        self._zeros = file.size
        """There are only zeros from this offset on."""

    def is_zero(self, offset: int) -> bool:
        """Return whether there are only zeros from an offset on."""
        if offset < self._content:
            return False
        for begin, chunk in self._file.chunks(offset, 0):
            if begin >= self._zeros:
                break
            content = chunk.lstrip(b"\0")
            if content:
                self._content = begin + len(chunk) - len(content) + 1
                return False
        self._zeros = min(self._zeros, offset)
        return True


def _next_member(file: Places, start: int) -> int:
    """Return the offset of the next valid header, or the end of the file.

    Every offset is searched, not only multiples of 512: bytes may be missing.
    """
    for begin, chunk in file.chunks(start, _BLOCK - 1):
        at = chunk.find(_MAGIC, _MAGIC_AT)
        while 0 <= at <= len(chunk) - _BLOCK + _MAGIC_AT:
            header = chunk[at - _MAGIC_AT : at - _MAGIC_AT + _BLOCK]
            try:
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                if 0 <= member.size <= file.size - begin - at + _MAGIC_AT - _BLOCK:
                    return begin + at - _MAGIC_AT
            except (*_SENSELESS, tarfile.TarError):
                pass
            at = chunk.find(_MAGIC, at + 1)
    return file.size


class _Member(NamedTuple):
    """A file in a tar."""

    name: str
    header: int
    offset: int
    length: int

    @property
    def folder(self) -> str:
        """The path of its folder; "" without one."""
        return "/".join(split_path(self.name)[:-1])

    def damage(self, reason: str) -> Damage:
        """Return that it cannot be used."""
        end = self.offset + self.length
        return Damage(self.header, end, f"{self.name} at byte {self.header}: {reason}")


@dataclass
class _Group:
    """Members that share a key."""

    key: str
    members: list[tuple[str, _Member]]
    """Each with what follows the key, in lower case: `jpg`, or `2024.jpg` after a first dot."""
    doubtful: bool
    """Whether there is damage next to the group, which may have been a part of it."""

    @property
    def about(self) -> set[str]:
        """The kinds of members that may have the class."""
        return dict(self.members).keys() & set(_ABOUT)

    def split(self) -> Iterator["_Group"]:
        """Yield the groups of members whose names are equal up to the last dot."""
        groups: dict[str, _Group] = {}
        for kind, member in self.members:
            stem, _, ending = kind.rpartition(".")
            group = groups.setdefault(stem, _Group(f"{self.key}.{stem}", [], self.doubtful))
            group.members.append((ending, member))
        yield from groups.values()


Item = Stored | Damage | Skipped
"""A part of a tar: an image, damage, or a member that is neither an image nor describes one."""


def scan_images(path: Path, stopped: Event | None = None) -> Iterator[Item]:
    """Yield the images of a tar in its order, and what is left out.

    An image next to damage may have lost the member with its class. Such an image is listed only if
    it has the same kinds of members as the first image that is not next to damage. If there is no
    such image, it must have all kinds in the file.

    An image without a number has the path of its folder as `class_name`.
    """
    file = open_pass(path, stopped, in_order=True)
    waiting: list[_Group] = []
    seen: set[str] = set()
    expected: set[str] | None = None
    for item in _groups(file, 0):
        if not isinstance(item, _Group):
            yield item
            continue
        seen |= item.about
        if item.doubtful and expected is None:
            waiting.append(item)
            continue
        if expected is None and _find_images(file, item):
            expected = item.about
        if expected is not None:
            for group in waiting:
                yield from _list_group(file, group, expected)
            waiting = []
        yield from _list_group(file, item, expected or set())
    for group in waiting:
        yield from _list_group(file, group, seen)


def _groups(file: Places, start: int) -> Iterator[_Group | Damage | Skipped]:
    group = None
    last_stem = ""
    beside_damage = False
    end = 0
    for member in members(file, start):
        if isinstance(member, Damage):
            yield member
            beside_damage = True
            end = 0
            if group is not None:
                group.doubtful = True
            continue
        end = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isreg() else 0)
        kind = _find_reason(member)
        if kind:
            yield Skipped(kind, member.name)
            continue
        name = _KEY.match(member.name)
        key, ending = name.groups() if name else (member.name, "")
        stem, _, _ = member.name.rpartition(".")
        is_full = group is not None and len(group.members) >= _MOST_TOGETHER
        if group is None or key != group.key or (is_full and stem != last_stem):
            if group is not None:
                yield group
            group = _Group(key, [], beside_damage)
        last_stem = stem
        place = _Member(member.name, member.offset, member.offset_data, member.size)
        group.members.append((ending.lower(), place))
        beside_damage = False
    if group is not None:
        yield group
    if end > max(file.size - 2 * _BLOCK, 0):  # cut between members, which no checksum shows
        yield Skipped(class_folders.NO_END, "")


def _find_reason(member: tarfile.TarInfo) -> str:
    """Return the kind of a member that is no file to look at; "" if it is one."""
    if "/." in "/" + "/".join(split_path(member.name)):
        return class_folders.HIDDEN
    if member.isdir():
        return class_folders.EMPTY_CLASS  # unless images follow
    return "" if member.isfile() else class_folders.LINK


def _find_images(file: Places, group: _Group) -> list[_Member]:
    """Return the images of a group, that which counts first: one whose name has no second dot, by
    the order of endings."""
    ranks = []
    for kind, member in group.members:
        ending = kind.rpartition(".")[2]
        if ending in _RANKS:
            ranks.append(("." in kind, _RANKS[ending], member))
        elif ending not in _ABOUT:
            begin = file.read(member.offset, min(member.length, _BEGIN))
            if BEGINS_AS_IMAGE.match(begin):
                ranks.append((True, len(_RANKS), member))
    ranks.sort(key=itemgetter(0, 1))
    return list(map(itemgetter(2), ranks))


def _list_group(file: Places, group: _Group, expected: set[str]) -> Iterator[Item]:
    """Yield the image that the number of a group is for, or all of its images, and what is left
    out."""
    images = _find_images(file, group)
    label = NO_LABEL
    about: dict[str, object] = {}
    fault = ""
    try:
        if images:
            label, about = _read_about(file, group, expected)
    except ValueError as error:
        fault = str(error)
    has_label = label != NO_LABEL
    if not (has_label or fault) and any("." in kind for kind, _ in group.members):
        for part in group.split():
            yield from _list_group(file, part, set())
        return
    if not has_label and len(images) > 1:
        about = {}  # it is not known of which
    are_images = set(images)
    for kind, image in group.members:
        if image not in are_images:
            is_used = has_label or fault or "name" in about or group.doubtful
            if kind not in _ABOUT or not is_used:
                yield Skipped(class_folders.STRAY_FILE, image.name)
        elif has_label and image != images[0]:
            yield Skipped(class_folders.EXTRA_IMAGE, image.name)
        elif fault or not (has_label or image.folder):
            yield image.damage(fault or _MISSING)
        else:
            name = str(about.get("name", image.name))
            class_name = str(about.get("class_name", "")) if has_label else image.folder
            yield Stored(image.offset, image.length, label, name, class_name)


def _read_about(file: Places, group: _Group, expected: set[str]) -> tuple[int, dict[str, object]]:
    """Return the label of a group, and what its JSON says. Raises `ValueError` if they are wrong,
    or may be in the damage next to the group."""
    lost = sorted(expected - group.about)
    if group.doubtful and lost:
        raise ValueError(
            f"it has no {' and no '.join(lost)}, which may have been in the damaged bytes next"
            " to it"
        )
    parts: dict[str, tuple[str, bytes]] = {}
    for kind, member in group.members:
        if kind not in _ABOUT:
            continue
        if kind in parts:
            raise ValueError(f"it has two labels: {parts[kind][0]} and {member.name}")
        if member.length > _MOST_ABOUT_BYTES:
            raise ValueError(
                f"{member.name} has {member.length} bytes; expected at most {_MOST_ABOUT_BYTES}"
            )
        parts[kind] = (member.name, file.read(member.offset, member.length))
    name, content = parts.get("json", ("", b"{}"))
    try:
        about = parsed(content)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(about, dict):
        about = {}
    if "cls" in parts:
        name, content = parts["cls"]
        text = content.decode("ascii", "replace").strip()
    elif "label" in about:
        text = str(about["label"])
    else:
        return NO_LABEL, about
    if not text.isdigit():
        raise ValueError(f"{name} is {text[:40]!r}; expected the number of a class, counted from 0")
    return int(text), about


class Writer(Appended):
    """Writes a tar: for every sample the class, then the names as JSON, then the image."""

    @staticmethod
    def scan_ends(file: Places) -> Iterator[int | Damage]:
        """Yield the end of each sample of a file, and the damage between them."""
        for member in members(file):
            if isinstance(member, Damage):
                yield member
            elif member.name.rpartition(".")[2] not in _ABOUT:
                yield member.offset_data + -(-member.size // _BLOCK) * _BLOCK

    @staticmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample's bytes in the file, in pieces."""
        about = {"name": sample.name, "class_name": sample.class_name}
        kind = sample.name.rpartition(".")[2].lower()
        parts: dict[bytes, Bytes] = {
            b"cls": b"%d" % sample.label,
            b"json": json.dumps(about, ensure_ascii=True, allow_nan=False).encode(),
            kind.encode() if kind in _RANKS else b"jpg": sample.data,
        }
        pieces: list[Bytes] = []
        for ending, data in parts.items():
            header = _header(b"%08d.%b" % (sample.number, ending), len(data))
            pieces += [header, data, bytes(-len(data) % _BLOCK)]
        return pieces

    @property
    def length(self) -> int:
        """Length in bytes of the finished file."""
        end = self._ends[-1] + 2 * _BLOCK
        return end + -end % tarfile.RECORDSIZE

    def finish(self) -> None:
        """Write the end of the archive and give the file its final name."""
        self._write([bytes(self.length - self._ends[-1])])
        super().finish()


def _header(name: bytes, length: int) -> bytes:
    """Return the header of a file, ten times as fast as tarfile; the bytes are the same."""
    size = b"%011o\0" % length
    checksum = b"%06o\0 " % (_SUM + sum(name) + sum(size))
    return name.ljust(100, b"\0") + _BEFORE_SIZE + size + _BEHIND_SIZE + checksum + _BEHIND_CHECKSUM
