"""Archives and older files of PyTorch: other versions, damaged ones, and bombs."""

import copy
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats.torch_file import is_torch_file, load
from lockstep.weights.recognition import read_head
from tests.weights.formats.torch_file_cases import BASE, Ask, Members, convert_tensor, written


def rebuilt(path: Path, change: Callable[[Members], Members], **options: Any) -> Path:
    """Write a zip archive again with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in change(members).items():
            archive.writestr(name, data)
    return path


def move_root(members: Members) -> Members:
    return {name.replace("any/", "some other root/"): data for name, data in members.items()}


def without_byte_order(members: Members) -> Members:
    return {
        name: data for name, data in members.items() if name not in ("any/byteorder", "any/version")
    }


def big_endian(members: Members) -> Members:
    swapped = {
        name: np.frombuffer(data, "<f4").astype(">f4").tobytes()
        for name, data in members.items()
        if "/data/" in name
    }
    return members | swapped | {"any/byteorder": b"big"}


@pytest.mark.parametrize("change", [move_root, without_byte_order, big_endian])
def test_other_archives_are_read(change: Callable[[Members], Members], tmp_path: Path) -> None:
    path = rebuilt(written({"a": BASE}, tmp_path), change)
    assert load(path)["a"].tobytes() == convert_tensor(BASE).tobytes()
    assert load(path)["a"].dtype == np.float32


ARCHIVES: dict[str, tuple[Callable[[Members], Members], str]] = {
    "an absolute name": (lambda members: members | {"/etc/a": b""}, "leaves the archive"),
    "a name above": (lambda members: members | {"any/../../a": b""}, "leaves the archive"),
    "another system's name": (lambda members: members | {"any\\..\\a": b""}, "leaves the archive"),
    "a lost storage": (
        lambda members: {n: d for n, d in members.items() if n != "any/data/0"},
        "storage 0 is missing",
    ),
    "a short storage": (
        lambda members: members | {"any/data/0": b"1234"},
        "has 4 bytes in place of 96",
    ),
    "a long storage": (
        lambda members: members | {"any/data/0": bytes(97)},
        "has 97 bytes in place of 96",
    ),
    "two roots": (lambda members: members | {"b/data.pkl": b""}, "without a single data.pkl"),
    "no pickle": (lambda members: {"any/version": b"3"}, "without a single data.pkl"),
    "an unknown order": (
        lambda members: members | {"any/byteorder": b"middle"},
        "its byte order is b'middle'",
    ),
    "an older program": (
        lambda members: {"serialized_exported_program.json": b""},
        r"is a program \(torch\.export\.save\)",
    ),
    "many members": (
        lambda members: members | {f"any/{i}": b"" for i in range(101)},
        "members; expected at most 100",
    ),
}


@pytest.mark.parametrize(("change", "reason"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives_that_make_no_sense_are_refused(
    change: Callable[[Members], Members],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.weights.formats.torch_file._MOST_MEMBERS", 100)
    path = rebuilt(written({"a": BASE}, tmp_path), change)
    with pytest.raises(CheckpointError, match=reason):
        load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["any.pth"]


def save_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Conv2d(3, 4, 3)), path)


def save_program(path: Path) -> None:
    torch.export.save(
        torch.export.export(torch.nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8),)), path
    )


@pytest.mark.parametrize(
    ("save_it", "writer"),
    [(save_script, r"TorchScript, torch\.jit\.save"), (save_program, r"torch\.export\.save")],
)
def test_a_program_is_recognised_whatever_its_name_and_refused_as_no_weights(
    save_it: Callable[[Path], None], writer: str, tmp_path: Path
) -> None:
    save_it(tmp_path / "a.pt2")
    (tmp_path / "a.pt2").rename(tmp_path / "a")
    assert is_torch_file(read_head(tmp_path / "a"), tmp_path / "a")
    with pytest.raises(CheckpointError, match=rf"a is a program \({writer}\), not weights"):
        load(tmp_path / "a")


def test_compressed_members_are_refused_before_they_are_expanded(tmp_path: Path) -> None:
    path = rebuilt(
        written({"a": torch.zeros(10**6)}, tmp_path),
        lambda members: members,
        compression=zipfile.ZIP_DEFLATED,
    )
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="is compressed"):
        load(path)


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = written({"a": BASE}, tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("any/version", b"3")
    with pytest.raises(CheckpointError, match="two of its members have the same name"):
        load(path)


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = written({"a": torch.zeros(10**5)}, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("any/data/1", b"")
        again = copy.copy(archive.getinfo("any/data/0"))
        again.filename = "any/data/2"
        archive.filelist.append(again)
    with pytest.raises(CheckpointError, match="its members have more bytes than its own"):
        load(path)


def test_a_storage_with_another_byte_is_an_error(tmp_path: Path) -> None:
    path = written({"a": BASE}, tmp_path)
    data = path.read_bytes()
    begin = data.index(convert_tensor(BASE).tobytes())
    path.write_bytes(data[: begin + 5] + b"?" + data[begin + 6 :])
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        load(path)


class OfViews(pickle.Pickler):
    """Writes storages of the older container as views, as PyTorch did before 0.4."""

    def persistent_id(self, value: object) -> Any:
        return value.identifier if isinstance(value, View) else None


class View:
    def __init__(self, *view: Any) -> None:
        self.identifier = ("storage", torch.FloatStorage, "7", "cpu", 6, view)


def old_container(value: Any, numbers: np.ndarray) -> bytes:
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    file = io.BytesIO()
    for part in head:
        pickle.dump(part, file, 2)
    OfViews(file, 2).dump(value)
    pickle.dump(["7"], file, 2)
    file.write(np.int64(numbers.size).tobytes() + numbers.tobytes())
    return file.getvalue()


def test_views_of_the_older_container_are_read_as_pytorch_reads_them(tmp_path: Path) -> None:
    view = Ask(torch._utils._rebuild_tensor, View("8", 2, 4), 1, (2,), (2,))
    (tmp_path / "any.pth").write_bytes(old_container([view], np.arange(6, dtype=np.float32)))
    assert (
        load(tmp_path / "any.pth")[0].tolist()
        == torch.load(tmp_path / "any.pth", weights_only=True)[0].tolist()
        == [3, 5]
    )


@pytest.mark.parametrize(
    ("view", "numbers", "reason"),
    [
        (("8", 3, 4), 6, "a view reaches outside of its storage"),
        (("8", 2, 4), 5, "does not have 6 numbers"),
    ],
)
def test_views_that_make_no_sense_are_refused(
    view: tuple[Any, ...], numbers: int, reason: str, tmp_path: Path
) -> None:
    value = Ask(torch._utils._rebuild_tensor, View(*view), 0, (2,), (1,))
    (tmp_path / "any.pth").write_bytes(old_container([value], np.arange(numbers, dtype=np.float32)))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path / "any.pth")


def nest_twice(times: int = 60) -> bytes:
    """Return the instructions that make a list of 2**times numbers to print, since every list holds
    another one twice."""
    value: list[Any] = [1]
    for _ in range(times):
        value = [value, value]
    return pickle.dumps(value, 2)[2:-1]


def make_file(*parts: bytes) -> bytes:
    """Return a file of the older container without storages, whose object a pickle made by hand
    makes."""
    head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}))
    return head + b"\x80\x02" + b"".join(parts) + b"." + pickle.dumps([], 2)


MEMO = b"q\x07"
TEXT = b"X" + (2**20).to_bytes(4, "little") + b"a" * 2**20 + MEMO + b"0"
NUMBERS = b"](" + b"".join(b"M" + i.to_bytes(2, "little") for i in range(5000)) + b"e" + MEMO + b"0"
BOMBS: dict[str, tuple[bytes, str]] = {
    "a version": (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"\x80\x02" + nest_twice() + b".",
        "version is not 1001",
    ),
    "a key": (
        old_container([1], np.zeros(6)).replace(b"X\x01\x00\x00\x007", nest_twice()),
        "not a list of strings",
    ),
    "a function": (
        make_file(b"ctorch._tensor\n_rebuild_from_type_v2\n(", nest_twice(), b"NNNtR"),
        "a list in place of a _Global",
    ),
    "a path": (
        make_file(TEXT, b"cpathlib\nPosixPath\n(", b"h\x07" * 100_000, b"tR"),
        "a path has more than 4096",
    ),
    "sets": (
        make_file(NUMBERS, b"](", b"c__builtin__\nset\nh\x07\x85R" * 50, b"e"),
        "unpacks to more bytes than it has",
    ),
}


def test_texts_that_python_2_wrote_are_texts(tmp_path: Path) -> None:
    (tmp_path / "any.pth").write_bytes(make_file(b"}U\x01aT\x01\x00\x00\x00bs"))
    assert load(tmp_path / "any.pth") == {"a": "b"}


@pytest.mark.parametrize(("data", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_short_file_cannot_grow(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "any.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(tmp_path / "any.pth")
    assert len(str(caught.value)) < 1000
