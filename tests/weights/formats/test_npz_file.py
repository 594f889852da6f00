"""Archives of NumPy are read without pickles, and damage is an error."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.system.npz import read_npz
from lockstep.weights.formats import BFLOAT16, numbers
from lockstep.weights.formats.flax_file import dump_npz, is_npz, load_npz
from tests.weights.formats.cases import ARRANGED, assert_stored

WHOLE = {
    "params/conv_init/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "step": np.array(7, np.int64),
    "none": np.zeros((0, 3), np.float16),
}


def read(folder: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Any:
    with zipfile.ZipFile(folder / "any.npz", "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return load_npz(folder / "any.npz")


def member(value: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, value, **options)
    return stream.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote_is_read(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", **WHOLE)
    assert_stored(load_npz(tmp_path / "a.npz"), WHOLE)
    assert is_npz((tmp_path / "a.npz").read_bytes()[:4096])


def test_numpy_reads_what_was_written(tmp_path: Path) -> None:
    dump_npz(tmp_path / "a", WHOLE)
    assert_stored(dict(np.load(tmp_path / "a")), WHOLE)
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("value", ARRANGED.values(), ids=ARRANGED)
def test_arrays_of_any_layout_are_read(value: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=value)
    assert np.array_equal(load_npz(tmp_path / "a.npz")["a"], value)


def test_two_bytes_without_a_name_are_bfloat16(tmp_path: Path) -> None:
    """As which `numpy.save` stores the bfloat16 of JAX."""
    stored = np.array([0x3F80, 0xC000], np.uint16).view("V2")
    [value] = read(tmp_path, {"x.npy": member(stored)}).values()
    assert (value.dtype, numbers(value).tolist()) == (BFLOAT16, [1.0, -2.0])


PLAIN = member(np.zeros(3, np.float32))
ODD: dict[str, tuple[dict[str, bytes], str]] = {
    "objects": (
        {"x.npy": member(np.array([print], object), allow_pickle=True)},
        "'x' holds object, which is not accepted here",
    ),
    "texts": ({"x.npy": member(np.array(["text"]))}, "'x' holds <U4"),
    "too few bytes": ({"x.npy": PLAIN[:-1]}, r"'x' is float32 \[3\], but has 11 bytes"),
    "no array": ({"x.npy": b"text"}, "damaged"),
    "a header of code": (
        {"x.npy": PLAIN.replace(b"'descr': '<f4'", b"'descr': open()")},
        "damaged",
    ),
    "a huge shape": ({"x.npy": PLAIN.replace(b"(3,), }      ", b"(2**9**9,), }")}, "damaged"),
    "version 3": ({"x.npy": b"\x93NUMPY\x03\x00" + PLAIN[8:]}, r"version \(3, 0\)"),
}


@pytest.mark.parametrize(("members", "reason"), ODD.values(), ids=ODD)
def test_other_members_are_refused(members: dict[str, bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read(tmp_path, members)


def test_an_archive_that_expands_too_far_is_refused(tmp_path: Path) -> None:
    zeros = {"x.npy": member(np.zeros(10**6, np.float32))}
    with pytest.raises(CheckpointError, match="it expands to 4,000,128 bytes"):
        read(tmp_path, zeros, zipfile.ZIP_DEFLATED)


def test_a_member_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    np.savez(path, a=np.zeros(4, np.float32))
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 20 : entry + 24] = b"\xff\xff\xff\x7f"  # its packed size
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(ValueError, match="lists more bytes than it has"):
        read_npz(file, most_members=9, most_bytes=2**20, kinds="f")


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has the array 'x' twice"):
        read(tmp_path, {"x": PLAIN, "x.npy": PLAIN})


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    dump_npz(tmp_path / "a", WHOLE)
    whole = (tmp_path / "a").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_npz(tmp_path / "a")
    changed = bytearray(whole)
    changed[whole.index(np.arange(2, dtype=np.float32).tobytes()[1:]) + 3] ^= 1
    (tmp_path / "a").write_bytes(changed)
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        load_npz(tmp_path / "a")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_npz(tmp_path / "missing.npz")
