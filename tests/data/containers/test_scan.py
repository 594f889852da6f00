"""Listing in C against listing with the libraries of the formats: the same images and damage, whatever the file."""

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.data.containers import Damage, Places, Sample, _scan, tfrecord, webdataset
from lockstep.data.containers.tfrecord import framed
from tests.data.containers.shared import read, sample, unlike, write
from tests.data.containers.test_tfrecord import example, field, varint

KEYS = [("image/encoded", "image/class/label", "image/filename", "image/class/synset"), ("image", "label", "file_name", "x")]
LABELS = [0, 1, 7, 2**20, -1, 2**63 - 1, -(2**63)]
STRANGE: list[tuple[str, Any]] = [
    ("z", 3.5), ("y", [b"a", b"b"]), ("w", []), ("v", 5), ("image", b"other"), ("label", 3), ("é", b"1"),
    ("image/encoded", [b"one", b"two"]), ("image/class/label", b"text"), ("image/filename", 7), ("image/encoded", b"again"),
    ("image/class/label", (3, 4)), ("v", (3, 2**63)), ("image/class/label", ()),
]  # fmt: skip
BEHIND = [b"", b"", b"", field(1, b""), field(2, b"x"), b"\x08\x01", b"\0"]
KINDS = [
    ["jpg", "cls"],
    ["jpg"],
    ["JPEG"],
    ["jpg", "png"],
    ["cls", "cls", "jpg"],
    ["CLS", "jpg"],
    ["txt", "jpg"],
    ["seg.png"],
    [""],
]
CONTENTS = {
    "cls": [b"3", b" 4 \n", b"x", b"", b"9" * 70, "٤".encode()],
    "json": [b"{}", b'{"label": 3, "class_name": "c", "name": "n/1.jpg"}', b"[1]", b"{", b"", b'{"p": "%s"}' % bytes(5000)],
}
FIELDS = [(0, 12), (90, 100), (100, 108), (108, 116), (116, 124), (124, 136), (136, 148), (156, 157), (257, 265), (345, 350)]
"""Of a header: name, mode, owner, group, size, time, kind, magic number, front of a long name."""
FOLDERS = ["", "", "", "n01/", "./", "a.b/", "é/", "x" * 90 + "/", "y" * 88 + "/", "..//"]
BASES = ["000001", "000001", "000002", "000003", ".h", "é"]


def tfrecords(rng: random.Random) -> bytes:
    data = b""
    for _ in range(rng.randrange(6)):
        image = rng.randbytes(rng.choice([0, 1, 5, 130, 300, 3500]))
        values = (image, rng.choice(LABELS), rng.choice([b"a/b.jpg", b"\xff", b""]), b"n01")
        features = [each for each in zip(rng.choice(KEYS), values, strict=True) if rng.random() < 0.95]
        if rng.random() < 0.3:
            features.insert(rng.randrange(len(features) + 1), rng.choice(STRANGE))
        whole = b"".join(entry(key, value) for key, value in features)
        message = bytearray(field(1, whole) + rng.choice(BEHIND))
        if rng.random() < 0.1:
            message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
        data += b"".join(framed(bytes(message)))
    return data


def entry(key: str, value: Any) -> bytes:
    """Of a map; more than one number in a tuple."""
    if isinstance(value, tuple):
        numbers = field(1, b"".join(map(varint, value)))
        return field(1, field(1, key.encode()) + field(2, field(3, numbers)))
    message = example({key: value})
    return message[next(i for i in range(1, len(message)) if message[i] < 128) + 1 :]


def tar(rng: random.Random) -> bytes:
    file = io.BytesIO()
    formats = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    with tarfile.open(fileobj=file, mode="w", format=rng.choice(formats), encoding="utf-8") as opened:
        for _ in range(rng.randrange(7)):
            stem = rng.choice(FOLDERS) + rng.choice(BASES)
            if rng.random() < 0.1:
                other = tarfile.TarInfo(stem)
                other.type = rng.choice([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.AREGTYPE])
                other.size = rng.choice([0, 0, 5])
                header = other.tobuf(opened.format, opened.encoding, opened.errors)  # alone, which addfile of 3.13 refuses
                opened.fileobj.write(header)
                opened.offset += len(header)
            for kind in ["cls", "json", "jpg"] if rng.random() < 0.7 else rng.choice(KINDS):
                content = rng.choice(CONTENTS.get(kind.lower(), [b"", b"image", unlike(512, 0), unlike(4000, 1)]))
                member = tarfile.TarInfo(f"{stem}.{kind}")
                member.size, member.mtime = len(content), rng.choice([0, 0, 0, 2**33 - 1])
                opened.addfile(member, io.BytesIO(content))
    return file.getvalue() if rng.random() < 0.5 else tampered(file.getvalue(), rng)


def tampered(data: bytes, rng: random.Random) -> bytes:
    """Change a byte of a header and its checksum with it."""
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return data
    at = rng.choice(headers)
    header = bytearray(data[at : at + 512])
    field = rng.choice([*FIELDS, (0, 512)])
    header[rng.randrange(*field)] = rng.choice([*b"\0 017589./5x\n", 128, 255])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


def damaged(data: bytes, rng: random.Random) -> bytes:
    bytes_ = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 3]) if data else 0):
        at = rng.randrange(len(bytes_) + 1)
        change = rng.randrange(4)
        if change == 0 and at < len(bytes_):
            bytes_[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del bytes_[at : at + rng.choice([1, 4, 512])]
        elif change == 2:
            bytes_[at:at] = rng.randbytes(rng.choice([1, 8, 512]))
        elif rng.random() < 0.3:
            del bytes_[at:]
    return bytes(bytes_)


def listing(format: ModuleType, path: Path) -> list[object]:
    """What is found, but for the place of a TFRecord's image: Python takes the first that holds the same bytes."""
    found: list[object] = []
    for item in format.stored(path):
        is_image = not isinstance(item, Damage)
        found.append((read(format, path, item), item._replace(offset=0)) if is_image else item)
    return found


@pytest.mark.parametrize(("format", "written", "files"), [(tfrecord, tfrecords, 8000), (webdataset, tar, 6000)])
def test_any_file_is_listed_as_it_is_without(
    format: ModuleType,
    written: Callable[[random.Random], bytes],
    files: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, path = random.Random(0), tmp_path / "any"
    for number in range(files):
        path.write_bytes(damaged(written(rng), rng))
        monkeypatch.setattr(format, "_AT_ONCE", rng.choice([1, 2, 2**10]))
        monkeypatch.setattr(format, "_ONE_BY_ONE", 1, raising=False)
        monkeypatch.setattr(format, "scan", _scan)
        found = listing(format, path)
        monkeypatch.setattr(format, "scan", None)
        assert found == listing(format, path), f"file {number}"


def many() -> list[Sample]:
    """Images of any length up to more than three parts of a checksum, of some classes."""
    return [sample(i, i % 3, unlike(max(1, 73 * i), i)) for i in range(150)]


def test_usual_records_are_listed_here_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tfrecord, tmp_path / "train-00000-of-00001", many())
    monkeypatch.setattr(tfrecord, "_stored", otherwise := Mock())
    monkeypatch.setattr(tfrecord, "_AT_ONCE", 40)
    assert [read(tfrecord, path, item) for item in tfrecord.stored(path)] == [each.data for each in many()]
    assert otherwise.call_count == 0


def test_all_but_the_last_of_usual_samples_are_listed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has more members than stand there is not known."""
    path = write(webdataset, tmp_path / "train-000000.tar", many())
    monkeypatch.setattr(webdataset, "_of_group", otherwise := Mock(wraps=webdataset._of_group))
    monkeypatch.setattr(webdataset, "_AT_ONCE", 40)
    found = list(webdataset.stored(path))
    assert [(read(webdataset, path, item), item.label, item.class_name, item.name) for item in found] == [
        (each.data, each.label, each.class_name, each.name) for each in many()
    ]
    assert otherwise.call_count == 1


@pytest.mark.parametrize(("begin", "most"), [(-1, 1), (0, 0), (0, 2**21)])
def test_senseless_bounds_are_refused(begin: int, most: int, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    file = Places(tmp_path / "any")
    with pytest.raises(ValueError, match=f"{most} images from byte {begin} on"):
        _scan.samples(file.descriptor, 0, begin, most)
    with pytest.raises(ValueError, match=f"{most} images from byte {begin} on"):
        _scan.records(file.descriptor, 0, begin, 1, most, ())
    with pytest.raises(ValueError, match="5 sets of keys; there is room for 4"):
        _scan.records(file.descriptor, 0, 0, 1, 1, ((b"", b"", b"", b"", 0),) * 5)


def test_a_file_that_became_shorter_is_listed_as_far_as_it_is_there(tmp_path: Path) -> None:
    for format, name in ((tfrecord, "a.tfrecord"), (webdataset, "a.tar")):
        path = write(format, tmp_path / name, many())
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[: size // 2])
        file = Places(path)
        if format is tfrecord:
            images, end = _scan.records(file.descriptor, size, 0, size, 2**10, tfrecord._ENCODED_KEYS)
        else:
            images, end = _scan.samples(file.descriptor, size, 0, 2**10)
        assert 50 < len(images) < 150
        assert end <= size // 2


@pytest.mark.parametrize("length", [0, 1, 7, 8, 3071, 3072, 3073, 100_000])
def test_a_record_is_framed_as_it_is_without(length: int) -> None:
    rng = random.Random(length)
    payloads = [
        (rng.randbytes(rng.randrange(20)), memoryview(rng.randbytes(length)), rng.randbytes(cut)) for cut in range(9)
    ]
    frames = [(record[0], record[-1]) for record in (framed(*payload) for payload in payloads)]
    assert _scan.frames(payloads) == frames
    assert _scan.frames([]) == []


@pytest.mark.parametrize(
    "payloads", [((b"", b"", b""),), [[b"", b"", b""]], [(b"", b"", b""), (b"", b"")], [(b"", "", b"")]]
)
def test_what_is_no_payload_is_refused(payloads: Any) -> None:
    with pytest.raises(TypeError):
        _scan.frames(payloads)


def test_a_writers_records_are_those_of_each_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    samples = [sample(number, number, unlike(10**number, number)) for number in range(5)]
    with tfrecord.Writer(tmp_path / "any") as writer:
        one_by_one = [list(map(bytes, writer.record(each))) for each in samples]
        for module in (_scan, None):
            monkeypatch.setattr(tfrecord, "scan", module)
            assert [b"".join(record) for record in writer.records(samples)] == [b"".join(record) for record in one_by_one]
