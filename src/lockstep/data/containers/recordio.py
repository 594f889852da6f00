"""RecordIO, MXNet's format: consecutive records in `.rec`, their offsets in `.idx`, their sources
in `.lst`.

The code is our own because the only library for the format is a retired framework. dmlc-core's
recordio.cc frames a record as follows, in little endian:

    magic 0xced7230a | flag << 29 | length, 4 bytes each | payload | zeros up to a multiple of 4

A payload that contains the magic number at a multiple of 4 is split there, and the number is left
out. The parts have the flags 1 (the first), 2 (those between) and 3 (the last); an undivided record
has the flag 0. The payload of an image is `Header`, then the image file.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np

from lockstep.data.containers import Appended, Bytes, Damage, Sample, Stored
from lockstep.data.containers.places import Places
from lockstep.data.stores.places import open_pass
from lockstep.system.files import written_text
from lockstep.system.regular_files import RECORDS, read_regular_text

MAGIC = 0xCED7230A
MOST_BYTES = 2**29 - 1
"""The maximum length of a part: the format stores the length in 29 bits."""
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_FRONT = np.dtype(
    [
        ("magic", "<u4"),
        ("length", "<u4"),
        ("labels", "<u4"),
        ("label", "<f4"),
        ("numbers", "<u8", 2),
    ]
)
"""The frame and header of an undivided record."""
assert _FRONT.itemsize == _FRAME.size + _HEADER.size
_UP_TO_LABELS = struct.Struct("<III")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_SHORT = 64
"""In at most this many bytes, Python finds the magic number faster than NumPy."""
_AT_ONCE = 2**10
_ONE_BY_ONE = 2**4
"""The number of records listed at a time: if they have the same simple form, and if not."""
_MOST_LABELS = 2**24
"""Labels below this are listed the fast way. Much larger ones do not fit an integer; a listing has
fewer classes anyway."""


_LEAST_LINES = 2**20
"""A `.lst` may have this many lines, however few records there are."""


class Header(NamedTuple):
    """The header before an image: `IRHeader` of MXNet."""

    labels: tuple[float, ...]
    """One or more labels. Several labels are written after the header, which has their count
    (MXNet's flag)."""
    number: int
    second_number: int = 0


class Record(NamedTuple):
    """The position of a record in a file."""

    offset: int
    """The offset of its first frame."""
    spans: tuple[tuple[int, int], ...]
    """The begin and end of each part of its payload."""
    end: int
    """The offset where the next record begins."""
    front: bytes
    """The first bytes of its first part, as many as a header has; all of them if the part is
    shorter."""


def frame_record(*payload: Bytes) -> list[Bytes]:
    """Return the bytes of a record in a file, in pieces. Raises `ValueError` if it is too long.

    The payload may be in pieces; the length of every piece except the last must be a multiple of 4.
    """
    cuts = [_find_magic(piece) for piece in payload]
    if not any(cuts):
        return _part(_WHOLE, payload)
    parts: list[list[Bytes]] = [[]]
    for piece, inside in zip(payload, cuts, strict=True):
        begin = 0
        for cut in inside:
            parts[-1].append(piece[begin:cut])
            parts.append([])
            begin = cut + len(_MAGIC_BYTES)
        parts[-1].append(piece[begin:])
    flags = (_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST)
    pieces = []
    for flag, part in zip(flags, parts, strict=True):
        pieces += _part(flag, part)
    return pieces


def _part(flag: int, pieces: Sequence[Bytes]) -> list[Bytes]:
    length = sum(map(len, pieces))
    if length > MOST_BYTES:
        raise ValueError(
            f"a part of the record has {length} bytes; a part can have at most {MOST_BYTES}"
        )
    return [_FRAME.pack(MAGIC, flag << 29 | length), *pieces, bytes(-length % 4)]


def _find_magic(data: Bytes) -> list[int]:
    """Return every offset of the magic number that is a multiple of 4."""
    if len(data) <= _SHORT and _MAGIC_BYTES not in bytes(data):
        return []
    words = np.frombuffer(data, "<u4", len(data) // 4)
    return [4 * at for at in (words == MAGIC).nonzero()[0].tolist()]


def read_record(file: Places, offset: int) -> Record:
    """Return the record that begins at an offset. Raises `ValueError` with the problem and its
    offset."""
    spans: list[tuple[int, int]] = []
    at = offset
    front = b""
    while True:
        if at + _FRAME.size > file.size:
            raise ValueError(
                f"the file ends at byte {file.size} within the record at byte {offset}"
            )
        read = file.read(at, min(_FRAME.size + _HEADER.size, file.size - at))
        magic, word = _FRAME.unpack_from(read)
        if magic != MAGIC:
            raise ValueError(
                f"no record begins at byte {at}: expected {MAGIC:#x}, found {magic:#x}"
            )
        flag = word >> 29
        length = word & MOST_BYTES
        expected = (_WHOLE, _FIRST) if not spans else (_MIDDLE, _LAST)
        if flag not in expected:
            raise ValueError(
                f"the part at byte {at} has flag {flag}, expected {expected[0]} or {expected[1]}"
            )
        begin = at + _FRAME.size
        at = begin + length + -length % 4
        if at > file.size:
            raise ValueError(
                f"the file ends at byte {file.size} within the record at byte {offset}"
            )
        if not spans:
            front = read[_FRAME.size :][:length]
        spans.append((begin, begin + length))
        if flag in (_WHOLE, _LAST):
            return Record(offset, tuple(spans), at, front)


def records(file: Places, offset: int = 0) -> Iterator[Record | Damage]:
    """Yield every record from an offset on, in order, and the damage between the records.

    A record counts as damaged if no other record begins directly after it: its length may be wrong,
    or bytes may have been added to it or lost. The records after it are found at any offset.
    """
    before = None
    while offset < file.size:
        try:
            record = read_record(file, offset)
        except ValueError as error:
            begin = offset
            if before is not None:
                if _begins(file, offset):
                    yield before
                else:
                    begin = before.offset
            offset = _next_record(file, begin)
            before = None
            yield Damage(begin, offset, str(error))
            continue
        if before is not None:
            yield before
        before = record
        offset = record.end
    if before is not None:
        yield before


def _begins(file: Places, offset: int) -> bool:
    """Return whether a record begins here. A damaged record counts, and so does a record cut off by
    the end of the file."""
    front = file.read(offset, min(_FRAME.size, file.size - offset))
    if len(front) < _FRAME.size:
        return _MAGIC_BYTES.startswith(front[:4])
    magic, word = _FRAME.unpack(front)
    return magic == MAGIC and word >> 29 not in (_MIDDLE, _LAST)


def _next_record(file: Places, offset: int) -> int:
    """Return where the first intact record after an offset begins, or the end of the file.

    Every offset is searched, not only multiples of 4: bytes may be missing.
    """
    for start, chunk in file.chunks(offset + 1, len(_MAGIC_BYTES) - 1):
        at = chunk.find(_MAGIC_BYTES)
        while at >= 0:
            if _is_sound(file, start + at):
                return start + at
            at = chunk.find(_MAGIC_BYTES, at + 1)
    return file.size


def _is_sound(file: Places, offset: int) -> bool:
    """Return whether a record begins here and another one directly after it."""
    try:
        return _begins(file, read_record(file, offset).end)
    except ValueError:
        return False


def read_payload(file: Places, record: Record) -> bytes:
    """Return a record's payload, with the magic numbers at which it was split.

    Raises `ValueError` if it is too long, or if a part still contains the magic number at a
    multiple of 4: then a length in the record is wrong.
    """
    file.check(record.offset, record.end - record.offset)
    parts = [file.read(begin, end - begin) for begin, end in record.spans]
    for (begin, _), part in zip(record.spans, parts, strict=True):
        inside = _find_magic(part)
        if inside:
            raise ValueError(
                f"a part begins at byte {begin + inside[0]}, inside the part at byte"
                f" {begin - _FRAME.size}"
            )
    return _MAGIC_BYTES.join(parts)


def pack_header(header: Header) -> bytes:
    """Return the bytes before the image in a payload."""
    if len(header.labels) == 1:
        return _HEADER.pack(0, header.labels[0], header.number, header.second_number)
    labels = np.asarray(header.labels, "<f4").tobytes()
    return _HEADER.pack(len(header.labels), 0.0, header.number, header.second_number) + labels


def unpack_header(payload: bytes) -> tuple[Header, int]:
    """Return the header of an image's payload, and where the image begins. Raises `ValueError` if
    it is too short."""
    if len(payload) < _HEADER.size:
        raise ValueError(
            f"a record of {len(payload)} bytes has no room for a header of {_HEADER.size}"
        )
    count, label, number, second = _HEADER.unpack_from(payload)
    begin = _HEADER.size + 4 * count
    if len(payload) < begin:
        raise ValueError(f"a record of {len(payload)} bytes has no room for {count} labels")
    labels = (label,)
    if count:
        labels = tuple(np.frombuffer(payload, "<f4", count, _HEADER.size).tolist())
    return Header(labels, number, second), begin


def scan_images(path: Path, stopped: Event | None = None) -> Iterator[Stored | Damage]:
    """Yield the images of a `.rec` file in its order; no `.idx` is used. An image with several
    labels counts as damage: only the writer knows which of them is the class.

    Names come from the `.lst` next to the file, if there is one: a line for each record, `number
    <tab> labels <tab> path`.
    """
    file = open_pass(path, stopped, read_ahead=True)
    names = _read_names(path.with_suffix(".lst"), file.size // _FRONT.itemsize)
    offset = 0
    while offset < file.size:
        images, offset = _scan_plain(file, offset, names)
        if images:
            yield from images
            continue
        for record in islice(records(file, offset), _ONE_BY_ONE):
            offset = record.end
            if isinstance(record, Damage):
                yield record
                continue
            try:
                yield _find_image(file, record, names)
            except ValueError as error:
                reason = f"the record at byte {record.offset}: {error}"
                yield Damage(record.offset, record.end, reason)


def _scan_plain(file: Places, offset: int, names: dict[int, str]) -> tuple[list[Stored], int]:
    """Return the next consecutive images whose records are undivided and have one label each, and
    where these records end.

    `records` and `_find_image` return the same, but take three times as long. The last such
    record is left to those functions, because they check whether another record begins after it.
    """
    fronts: list[bytes] = []
    at = offset
    while len(fronts) < _AT_ONCE and at + _FRONT.itemsize <= file.size:
        front = file.read(at, _FRONT.itemsize)
        magic, length, labels = _UP_TO_LABELS.unpack_from(front)
        if magic != MAGIC or not _HEADER.size <= length <= MOST_BYTES or labels:
            break
        fronts.append(front)
        at += _FRAME.size + length + -length % 4
    array = np.frombuffer(b"".join(fronts[:-1]), _FRONT)
    with np.errstate(invalid="ignore"):
        label = array["label"]
        is_class = (label >= 0) & (label < _MOST_LABELS) & (label % 1 == 0)
    array = array[np.logical_and.accumulate(is_class)]
    lengths = array["length"].astype(np.int64)
    ends = offset + np.cumsum(_FRAME.size + lengths + -lengths % 4)
    numbers = array["numbers"][:, 0].tolist()
    images = zip(
        (ends - lengths - -lengths % 4 + _HEADER.size).tolist(),
        (lengths - _HEADER.size).tolist(),
        array["label"].astype(np.int64).tolist(),
        [names.get(number, "") for number in numbers],
        repeat(""),
        [number if number < 2**63 else -1 for number in numbers],
        repeat(False),
    )
    return list(map(Stored._make, images)), int(ends[-1]) if len(ends) else offset


def _find_image(file: Places, record: Record, names: dict[int, str]) -> Stored:
    in_parts = len(record.spans) > 1
    begin, end = record.spans[0]
    if in_parts:
        payload = read_payload(file, record)
        length = len(payload)
    else:
        payload = record.front
        length = end - begin
    count = 0
    if len(payload) >= _HEADER.size:
        (count, *_) = _HEADER.unpack_from(payload)
    if count and _HEADER.size + 4 * count > length:
        raise ValueError(f"a record of {length} bytes has no room for {count} labels")
    if count > 1:
        raise ValueError(
            f"it has {count} labels; expected one, the number of its class. Write it with that"
            " label alone: for a one-hot vector, the position of its 1"
        )
    if count and not in_parts:
        payload = file.read(begin, _HEADER.size + 4)
    header, image = unpack_header(payload)
    label = header.labels[0]
    if not label.is_integer() or label < 0:
        raise ValueError(f"its label is {label:g}; expected a class, counted from 0")
    return Stored(
        record.offset if in_parts else begin + image,
        length - image,
        int(label),
        names.get(header.number, ""),
        number=header.number if header.number < 2**63 else -1,
        in_parts=in_parts,
    )


def _read_names(path: Path, most: int) -> dict[int, str]:
    """Return the names in a `.lst`. Raises `ValueError` if it is much longer than for `most`
    records."""
    if not path.exists():
        return {}
    text = read_regular_text(path, RECORDS, errors="surrogateescape")
    lines = text.count("\n")
    if lines > max(most, _LEAST_LINES):
        raise ValueError(f"{path.name} has {lines} lines; expected one for each of {most} records")
    # Not splitlines: it also splits at characters that names can contain.
    names = {}
    for line in text.split("\n"):
        fields = line.split("\t")
        if len(fields) > 2 and fields[0].isdecimal():
            names[int(fields[0])] = fields[-1]
    return names


def image_in_parts(file: Places, offset: int) -> bytes:
    """Return the image of a record that is split into several parts. Raises `ValueError` if no such
    record is there."""
    payload = read_payload(file, read_record(file, offset))
    return payload[unpack_header(payload)[1] :]


def read_index(path: Path) -> list[tuple[int, int]]:
    """Return number and offset of every record of an `.idx` file. Raises `ValueError` naming a line
    without these."""
    places = []
    text = read_regular_text(path, RECORDS, encoding="ascii", errors="replace")
    for row, line in enumerate(text.splitlines(), 1):
        number, tab, offset = line.partition("\t")
        if not (tab and number.isdigit() and offset.strip().isdigit()):
            raise ValueError(
                f"line {row} of {path.name} is {line[:60]!r}; expected a number, a tab and an"
                " offset"
            )
        places.append((int(number), int(offset)))
    return places


class Writer(Appended):
    """Writes a `.rec` file, with its `.idx` and `.lst`."""

    @staticmethod
    def scan_ends(file: Places) -> Iterator[int | Damage]:
        """Yield the end of each record of a file, and the damage between them."""
        for record in records(file):
            yield record if isinstance(record, Damage) else record.end

    @staticmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample's bytes in the file, in pieces. Raises `ValueError` if it is too long."""
        return frame_record(pack_header(Header((float(sample.label),), sample.number)), sample.data)

    def describe(self, rows: Iterable[tuple[int, int, str]]) -> list[Path]:
        """Write `.idx` and `.lst` as im2rec does, from number, label and name of every sample;
        return their paths."""
        index = self.path.with_suffix(".idx")
        listing = self.path.with_suffix(".lst")
        with written_text(index) as places, written_text(listing) as names:
            for (number, label, name), begin in zip(rows, self._ends[:-1], strict=True):
                places.write(f"{number}\t{begin}\n")
                names.write(f"{number}\t{label:f}\t{name}\n")
        return [index, listing]
