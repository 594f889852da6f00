"""What a file may cost: little memory for what was never written, and work in proportion to its
length."""

import errno
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from types import ModuleType
from unittest.mock import patch

import pytest

from lockstep.data import stored_files
from lockstep.data.class_folders import Skipped
from lockstep.data.containers import NO_LABEL, Damage, Stored, recordio, tfrecord, webdataset
from lockstep.data.containers.places import Budget, Places, Stopped
from lockstep.data.listing import list_images
from lockstep.data.sources import find_source
from lockstep.system.crc import masked_crc
from lockstep.system.errors import DataError

MAGIC = 0xCED7230A
GIB = 2**30


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def length(size: int) -> bytes:
    """Return the front of a TFRecord."""
    number = struct.pack("<Q", size)
    return number + struct.pack("<I", masked_crc(number))


def parts_of_records(path: Path) -> None:
    """16 parts of 512 MB."""
    with path.open("wb") as file:
        for i in range(16):
            flag = {0: 1, 15: 3}.get(i, 2)
            file.seek(i * 2**29 + 7 * i)
            file.write(struct.pack("<II", MAGIC, flag << 29 | 2**29 - 1) + bytes(24))
            file.truncate((i + 1) * (2**29 + 7))


def described_by(kind: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(header("a", 2 * GIB, kind))
            file.seek(512 + 2 * GIB)
            file.write(header("cat/a.jpg", 0) + bytes(1024))

    return write


def labelled(path: Path) -> None:
    with path.open("wb") as file:
        file.write(header("a.cls", 2 * GIB))
        file.seek(512 + 2 * GIB)
        file.write(header("a.jpg", 0) + bytes(1024))


def records_of(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(length(size))
        os.truncate(path, size + 16)

    return write


SPARSE: dict[str, tuple[ModuleType, Callable[[Path], None]]] = {
    "parts of a record": (recordio, parts_of_records),
    "a TFRecord of 4 GiB": (tfrecord, records_of(4 * GIB)),
    "a TFRecord of 1 GiB": (tfrecord, records_of(GIB)),
    "a .cls": (webdataset, labelled),
    "PAX": (webdataset, described_by(tarfile.XHDTYPE)),
    "a long name": (webdataset, described_by(tarfile.GNUTYPE_LONGNAME)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_what_was_never_written_is_not_read(name: str, tmp_path: Path) -> None:
    format, write = SPARSE[name]
    path = tmp_path / "any"
    write(path)
    assert path.stat().st_blocks * 512 < 2**18 < GIB <= path.stat().st_size
    tracemalloc.start()
    try:
        items = list(format.scan_images(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**23
    assert any(isinstance(item, Damage) for item in items)


def test_a_list_that_was_never_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.rec").write_bytes(b"")
    (tmp_path / "train.lst").write_bytes(b"")
    os.truncate(tmp_path / "train.lst", GIB)
    with pytest.raises(OSError, match=r"nearly all of its .* never written: .*train.lst"):
        list_images(find_source(tmp_path))


def chained_records(path: Path, amount: int) -> None:
    """First parts that all lead to the same middle parts, which never end."""
    firsts = (struct.pack("<II", MAGIC, 1 << 29 | 8 * (amount - i - 1)) for i in range(amount))
    path.write_bytes(b"".join(firsts) + struct.pack("<II", MAGIC, 2 << 29) * amount)


def nested_members(path: Path, amount: int) -> None:
    """Headers of members that all end before the same zeros, after which something follows."""
    headers = (header("a", 512 * (amount - i - 1)) for i in range(amount))
    path.write_bytes(b"".join(headers) + bytes(2**10 * amount) + b"1" * 512)


def nested_lengths(path: Path, amount: int) -> None:
    """Records that all end at the same place."""
    fronts = (length(12 * (amount - i)) for i in range(amount))
    path.write_bytes(b"".join(fronts) + bytes(16))


def long_names(path: Path, amount: int) -> None:
    path.write_bytes(header("a", 0, tarfile.GNUTYPE_LONGNAME) * amount)


def empty_records(path: Path, amount: int) -> None:
    path.write_bytes(length(0) + b"fail" if amount == 1 else (length(0) + b"fail") * amount)


REPEATED: dict[str, tuple[ModuleType, Callable[[Path, int], None]]] = {
    "first parts into one chain": (recordio, chained_records),
    "members that end together": (webdataset, nested_members),
    "records that end together": (tfrecord, nested_lengths),
    "long names of long names": (webdataset, long_names),
    "records with wrong checksums": (tfrecord, empty_records),
}


@pytest.mark.parametrize("name", REPEATED)
def test_twice_the_file_is_twice_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, write = REPEATED[name]
    monkeypatch.setattr("lockstep.data.containers.places._LEAST_WORK", 0)
    work = []
    for amount in (100, 200, 400):
        path = tmp_path / "any"
        write(path, amount)
        with (
            patch.object(Budget, "spend", autospec=True, side_effect=Budget.spend) as spend,
            suppress(ValueError),  # the budget is spent
        ):
            list(format.scan_images(path))
        work.append(sum(call.args[1] + 64 for call in spend.call_args_list))
    assert work[1] < 2.3 * work[0]
    assert work[2] < 2.3 * work[1]


class Counted(bytes):
    """A message that counts how often it is searched."""

    searches = 0

    def find(self, *args: object) -> int:  # type: ignore[override]
        self.searches += 1
        return super().find(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [10**3, 10**5])
def test_an_image_of_equal_bytes_is_found_by_two_searches(size: int) -> None:
    image = b"a" * size + b"b"
    payload = Counted(b"a" * 4 * size + image)
    assert payload[tfrecord.find_bytes(payload, image) :] == image
    assert payload.searches <= 2


def test_a_late_double_of_many_class_names_is_found_at_once(tmp_path: Path) -> None:
    """Comparing every name with all before it takes minutes."""
    (tmp_path / "train.rec").write_bytes(b"")
    names = [*map(str, range(200_000)), "199999"]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    with pytest.raises(DataError, match=r"classes.txt lists 199999 twice"):
        list_images(find_source(tmp_path))


def test_more_class_names_than_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.rec").write_bytes(b"")
    (tmp_path / "classes.txt").write_bytes(b"\n" * (2**20 + 1))
    with pytest.raises(DataError, match="lists more than 1048576 classes"):
        list_images(find_source(tmp_path))


@pytest.mark.parametrize("name", REPEATED)
def test_an_interruption_is_seen_within_one_read(name: str, tmp_path: Path) -> None:
    format, write = REPEATED[name]
    write(tmp_path / "any", 100)
    stopped = Event()
    reads = count()

    def spend(budget: Budget, length: int) -> None:
        if next(reads) == 20:
            stopped.set()
        original(budget, length)

    original = Budget.spend
    with patch.object(Budget, "spend", spend), pytest.raises(Stopped):
        list(format.scan_images(tmp_path / "any", stopped))
    assert next(reads) <= 25


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.rec"
    path.write_bytes(bytes(100))
    with (
        patch("os.pread", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))),
        pytest.raises(OSError, match=r"train\.rec"),
    ):
        Places(path).read(0, 10)


def test_searches_find_what_begins_in_a_hole(tmp_path: Path) -> None:
    """A length of a TFRecord may begin with zeros."""
    path = tmp_path / "any"
    record = length(256) + bytes(256)
    record += struct.pack("<I", masked_crc(bytes(256)))
    with path.open("wb") as file:
        file.write(b"damage")
        file.seek(2**16 - 1)
        file.write(record)
    [damage, rest] = tfrecord.scan_images(path)
    assert isinstance(damage, Damage)
    assert isinstance(rest, Damage | Stored | Skipped)
    assert damage.end == 2**16 - 1


def test_a_file_has_no_more_classes_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "MOST_CLASSES", 2)
    images = [Stored(i, 1, NO_LABEL, class_name=name) for i, name in enumerate("abc")]
    stored_files.StoredFile().add_images(images[:2], 0)
    with pytest.raises(ValueError, match="more than 2 classes"):
        stored_files.StoredFile().add_images(images, 0)
