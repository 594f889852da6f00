"""WebDataset: tar files in which the members of a sample are adjacent and share a key, the name up
to its first dot.

`<key>.jpg` is the image, `<key>.cls` its class as a number; `<key>.json` may have more. If an image
has no number, its class is the folder in its name, as in a tar of an image folder.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.containers import NO_LABEL, Appended, Bytes, Damage, Sample, Stored
from lockstep.data.containers.places import Places
from lockstep.data.stores.places import PlacesStream, open_places

_BLOCK = tarfile.BLOCKSIZE
_KEY = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]*)$")
_IMAGES = ("jpg", "jpeg", "png", "bmp", "gif", "ppm", "tif", "tiff", "webp")
_ABOUT = ("cls", "json")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_MAGIC = b"ustar"
_MAGIC_AT = 257
"""The magic text of a header, and its offset."""
_EMPTY = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
_BEFORE_SIZE = _EMPTY[100:124]
_BEHIND_SIZE = _EMPTY[136:148]
_BEHIND_CHECKSUM = _EMPTY[156:]
"""The constant parts of a file's header. For the sum of all bytes, the checksum itself counts as
spaces."""
_SUM = sum(_BEFORE_SIZE + _BEHIND_SIZE + b" " * 8 + _BEHIND_CHECKSUM)
_SEARCHED_BYTES = 2**20
_BUFFER_BYTES = 2**13
_SENSELESS = (ValueError, OverflowError, MemoryError, RecursionError)
"""What tarfile raises, in addition to its own errors, if a header has a right checksum but invalid
contents."""


def members(file: Places, start: int = 0) -> Iterator[tarfile.TarInfo | Damage]:
    """Yield the members of a tar from a header on, and the damage between them. Raises `ValueError`
    if it is compressed.

    Only headers have checksums. A member counts as damaged if neither another member nor the end of
    the archive follows it directly: bytes may have been added to it or lost. The members after it
    are found at any offset.
    """
    if file.read(0, min(file.size, 6)).startswith(_COMPRESSED):
        raise ValueError(
            "the tar is compressed: images in it cannot be read by offset. Unpack it, for example"
            " with gunzip"
        )
    with io.BufferedReader(PlacesStream(file), _BUFFER_BYTES) as stream:
        while start < file.size:
            last = None
            end = start
            torn = False
            reason = f"no member of a tar begins at byte {start}"
            stream.seek(start)
            try:
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        # Otherwise tarfile keeps all of them.
                        tar.members.clear()  # type: ignore[attr-defined]
                        if not _has_magic(file, member):
                            break
                        torn = not 0 <= member.size <= file.size - member.offset_data
                        if torn:
                            reason = f"the file ends at byte {file.size} within {member.name}"
                            break
                        if last is not None:
                            yield last
                        last = member
                        end = tar.offset
                        reason = f"no member of a tar begins at byte {end}"
            except (*_SENSELESS, tarfile.TarError) as error:
                reason += f": {str(error) or type(error).__name__}"
            ended = not torn and _only_zeros(file, end)
            if ended:
                start = file.size
            elif torn or last is None:
                start = _next_member(file, end + 1)
            else:
                start = _next_member(file, last.offset_data)
            is_end = ended and end <= start and (start - end) % _BLOCK == 0
            if last is not None and (torn or is_end):
                yield last
                last = None
            if last is not None or not ended:
                yield Damage(end if last is None else last.offset, start, reason)


def _has_magic(file: Places, member: tarfile.TarInfo) -> bool:
    """Return whether "ustar" is at its place in the header, or only zeros, as in the oldest tars.

    The checksum is not enough: it is a plain sum, which can be right in a header that is shifted by
    a byte.
    """
    magic = file.read(member.offset_data - _BLOCK + _MAGIC_AT, len(_MAGIC))
    return magic in (_MAGIC, bytes(len(_MAGIC)))


def _only_zeros(file: Places, offset: int) -> bool:
    while offset < file.size:
        length = min(_SEARCHED_BYTES, file.size - offset)
        if file.read(offset, length).count(0) != length:
            return False
        offset += length
    return True


def _next_member(file: Places, start: int) -> int:
    """Return the offset of the next valid header, or the end of the file.

    Every offset is searched, not only multiples of 512: bytes may be missing.
    """
    while start + _BLOCK <= file.size:
        chunk = file.read(start, min(_SEARCHED_BYTES, file.size - start))
        at = chunk.find(_MAGIC, _MAGIC_AT)
        while 0 <= at <= len(chunk) - _BLOCK + _MAGIC_AT:
            begin = at - _MAGIC_AT
            header = chunk[begin : begin + _BLOCK]
            try:
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                if 0 <= member.size <= file.size - start - begin - _BLOCK:
                    return start + begin
            except (*_SENSELESS, tarfile.TarError):
                pass
            at = chunk.find(_MAGIC, at + 1)
        start += len(chunk) - _BLOCK + 1
    return file.size


@dataclass
class _Group:
    """Members that share a key."""

    key: str
    members: dict[str, tarfile.TarInfo]
    doubtful: bool
    """Whether there is damage next to the group, which may have been a part of it."""

    @property
    def image(self) -> tarfile.TarInfo | None:
        return next((self.members[kind] for kind in _IMAGES if kind in self.members), None)

    @property
    def about(self) -> set[str]:
        return self.members.keys() & set(_ABOUT)


def scan_images(path: Path) -> Iterator[Stored | Damage]:
    """Yield the images of a tar in its order.

    An image next to damage may have lost the member with its class. Such an image is listed only if
    it has the same kinds of members as the first image that is not next to damage. If there is no
    such image, it must have all kinds in the file.
    """
    file = open_places(path, in_order=True)
    waiting: list[_Group] = []
    seen: set[str] = set()
    expected: set[str] | None = None
    for item in _groups(file, 0):
        if isinstance(item, Damage):
            yield item
            continue
        seen |= item.about
        if item.image is None:
            continue
        if item.doubtful and expected is None:
            waiting.append(item)
        else:
            if expected is None:
                expected = item.about
            for group in (*waiting, item):
                yield _find_image(file, group, expected)
            waiting = []
    for group in waiting:
        yield _find_image(file, group, seen)


def _groups(file: Places, start: int) -> Iterator[_Group | Damage]:
    group = None
    beside_damage = False
    for member in members(file, start):
        if isinstance(member, Damage):
            yield member
            beside_damage = True
            if group is not None:
                group.doubtful = True
            continue
        name = _KEY.match(member.name)
        if name is None or not member.isfile():
            continue
        if group is None or name[1] != group.key:
            if group is not None:
                yield group
            group = _Group(name[1], {}, beside_damage)
        group.members[name[2].lower()] = member
        beside_damage = False
    if group is not None:
        yield group


def _find_image(file: Places, group: _Group, expected: set[str]) -> Stored | Damage:
    image = group.image
    assert image is not None
    lost = sorted(expected - group.about)
    if group.doubtful and lost:
        reason = (
            f"it has no {' and no '.join(lost)}, which may have been in the damaged bytes next"
            " to it"
        )
        return _damage(image.name, image.offset, image.offset_data + image.size, reason)
    about = {}
    for kind in group.about:
        part = group.members[kind]
        about[kind] = (part.name, file.read(part.offset_data, part.size))
    return _sample(image.name, image.offset, image.offset_data, image.size, about)


def _sample(
    image: str, header: int, offset: int, length: int, parts: Mapping[str, tuple[str, bytes]]
) -> Stored | Damage:
    """Return an image from its name, its place and the other members of its sample.

    `parts` has the names and contents of `cls` and `json`.
    """
    try:
        about = _parse_about(*parts["json"]) if "json" in parts else {}
        label = _label(parts, about)
        class_name = str(about.get("class_name", ""))
        if label == NO_LABEL:
            class_name = image.rpartition("/")[0].rpartition("/")[2]
            if class_name in ("", "."):
                raise ValueError(
                    "it has no class: expected a number in .cls, or a folder in its name"
                )
    except ValueError as error:
        return _damage(image, header, offset + length, str(error))
    return Stored(offset, length, label, str(about.get("name", image)), class_name)


def _damage(image: str, header: int, end: int, reason: str) -> Damage:
    return Damage(header, end, f"{image} at byte {header}: {reason}")


def _parse_about(name: str, text: bytes) -> dict[str, object]:
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is not JSON") from None
    return about if isinstance(about, dict) else {}


def _label(parts: Mapping[str, tuple[str, bytes]], about: dict[str, object]) -> int:
    if "cls" in parts:
        where, content = parts["cls"]
        text = content.decode("ascii", "replace").strip()
    elif "label" in about:
        where = parts["json"][0]
        text = str(about["label"])
    else:
        return NO_LABEL
    if not text.isdigit():
        raise ValueError(
            f"{where} is {text[:40]!r}; expected the number of a class, counted from 0"
        )
    return int(text)


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
            kind.encode() if kind in _IMAGES else b"jpg": sample.data,
        }
        pieces: list[Bytes] = []
        for ending, data in parts.items():
            header = _header(b"%08d.%b" % (sample.number, ending), len(data))
            pieces += [header, data, bytes(-len(data) % _BLOCK)]
        return pieces

    def describe(self, rows: Iterable[tuple[int, int, str]]) -> list[Path]:
        """Return an empty list: a tar has no files that describe it."""
        return []

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
