"""MXNet files hold what was written, and damage is an error. Tests with MXNet itself are in
test_peers_of_mxnet."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, numbers
from lockstep.weights.formats.mxnet_params import dump, load
from tests.soak import EXAMPLES
from tests.weights.formats.cases import ARRANGED, Variables, assert_stored

KINDS = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_]
VALUES = st.sampled_from(KINDS).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=5, max_side=4))
)
VERSIONS = {
    "first": b"",
    "V1": b"\xc8\xfa\x93\xf9",
    "V2": b"\xc9\xfa\x93\xf9",
    "V3": b"\xca\xfa\x93\xf9",
}


def read(data: bytes, folder: Path) -> Variables:
    (folder / "any.params").write_bytes(data)
    return load(folder / "any.params")


def store_array(array: bytes, names: bytes | None = None, count: int = 1) -> bytes:
    """Return a file, made by hand, with one array called x."""
    names = struct.pack("<QQ", 1, 1) + b"x" if names is None else names
    return struct.pack("<QQQ", 0x112, 0, count) + array + names


def array_of(
    version: str = "V2", shape: tuple[int, ...] = (2,), data: bytes = bytes(8), **other: int
) -> bytes:
    storage = struct.pack("<i", other.get("storage", 0)) if version in ("V2", "V3") else b""
    sizes = struct.pack(
        f"<i{len(shape)}{'I' if version == 'first' else 'q'}", other.get("axes", len(shape)), *shape
    )
    return (
        VERSIONS[version]
        + storage
        + sizes
        + struct.pack("<3i", other.get("device", 1), 0, other.get("kind", 0))
        + data
    )


@EXAMPLES
@given(values=st.dictionaries(st.text(max_size=20), VALUES, max_size=10))
def test_reading_inverts_writing(
    values: Variables, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("mxnet") / "any.params"
    dump(path, values)
    arrays = load(path)
    assert list(arrays) == list(values)
    assert_stored(arrays, values)


def test_the_bytes_are_those_that_mxnet_writes(tmp_path: Path) -> None:
    """The file that mx.nd.save of MXNet 1.9.1 writes for {"x": [1, 2]}."""
    dump(tmp_path / "a", {"x": np.array([1, 2], np.float32)})
    expected = (
        "120100000000000000000000000000000100000000000000c9fa93f9000000000100000002000000000000000100000000000000"
        "000000000000803f000000400100000000000000010000000000000078"
    )
    assert (tmp_path / "a").read_bytes().hex() == expected


@pytest.mark.parametrize("value", ARRANGED.values(), ids=ARRANGED)
def test_arrays_of_any_layout_are_written(value: np.ndarray, tmp_path: Path) -> None:
    dump(tmp_path / "a", {"a": value})
    assert np.array_equal(load(tmp_path / "a")["a"], value)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_versions_of_an_array_are_read(version: str, tmp_path: Path) -> None:
    value = np.array([[1.5], [2.0]], np.float32)
    assert_stored(
        read(store_array(array_of(version, (2, 1), value.tobytes())), tmp_path), {"x": value}
    )


def test_where_shapes_are_numpys_an_array_may_have_none(tmp_path: Path) -> None:
    value = np.array(3, np.float32)
    assert_stored(read(store_array(array_of("V3", (), value.tobytes())), tmp_path), {"x": value})


def test_a_size_of_0_is_an_array_without_values(tmp_path: Path) -> None:
    assert_stored(
        read(store_array(array_of("V3", (0, 3), b"")), tmp_path),
        {"x": np.zeros((0, 3), np.float32)},
    )


def test_bfloat16_is_read_as_it_is(tmp_path: Path) -> None:
    weights = read(store_array(array_of(data=b"\x80\x3f\x00\xc0", kind=12)), tmp_path)
    assert_stored(weights, {"x": np.array([0x3F80, 0xC000], np.uint16).view(BFLOAT16)})
    assert numbers(weights["x"]).tolist() == [1, -2]


def test_arrays_of_a_gpu_are_read(tmp_path: Path) -> None:
    assert_stored(read(store_array(array_of(device=2)), tmp_path), {"x": np.zeros(2, np.float32)})


NAME = struct.pack("<Q", 1) + b"x"
ODD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its beginning needs 16 bytes from byte 0 on, but 0 are left"),
    "no such file": (
        b"PK\x03\x04 something else",
        "it begins with 0x.*04034b50 and .*, expected 0x112 and 0x0",
    ),
    "no version": (store_array(b"\xff" * 60), r"array 0 has 4294967295 axes, expected 1 to 32"),
    "too many arrays": (
        store_array(array_of(), count=2**60),
        "it claims to have 1152921504606846976 arrays in",
    ),
    "an array less": (
        store_array(array_of(), count=2),
        "the type of array 1 needs 12 bytes from byte 72 on, but 9 are left",
    ),
    "row_sparse": (
        store_array(array_of(storage=1)),
        "array 0 is row_sparse, expected a dense array",
    ),
    "csr": (store_array(array_of(storage=2)), "array 0 is csr, expected a dense array"),
    "another storage": (
        store_array(array_of(storage=7)),
        "array 0 is of storage type 7, expected a dense array",
    ),
    "no axes": (store_array(array_of(shape=())), "array 0 has 0 axes, expected 1 to 32"),
    "too many axes": (store_array(array_of(axes=33)), "array 0 has 33 axes"),
    "a number of axes below 0": (store_array(array_of("V3", axes=-1)), "array 0 has -1 axes"),
    "a negative size": (store_array(array_of(shape=(-2,))), r"array 0 has the shape \[-2\]"),
    "a huge array": (
        store_array(array_of(shape=(2**40, 2**40))),
        (
            r"array 0, float32 \[1099511627776, 1099511627776\], needs 4835703278458516698824704"
            r" bytes from byte 64 on"
        ),
    ),
    "a huge array without values": (store_array(array_of(shape=(0, 2**62, 2**62), data=b"")), ""),
    "another device": (
        store_array(array_of(device=77)),
        "array 0 has device 77 and type 0, expected",
    ),
    "another type": (store_array(array_of(kind=8)), "array 0 has device 1 and type 8, expected"),
    "no names": (store_array(array_of(), struct.pack("<Q", 0)), "it has 1 arrays and 0 names"),
    "more names": (
        store_array(array_of(), struct.pack("<Q", 2) + NAME * 2),
        "it has 1 arrays and 2 names",
    ),
    "a huge name": (
        store_array(array_of(), struct.pack("<QQ", 1, 2**63) + b"x"),
        "name 0 needs 9223372036854775808 bytes",
    ),
    "a name of other bytes": (
        store_array(array_of(), struct.pack("<QQ", 1, 1) + b"\xff"),
        "can't decode byte 0xff",
    ),
    "a name twice": (
        store_array(array_of() * 2, struct.pack("<Q", 2) + NAME * 2, 2),
        "two of its arrays have the name x",
    ),
    "more": (store_array(array_of()) + b"abc", "3 bytes follow its end"),
}


@pytest.mark.parametrize(("data", "reason"), ODD.values(), ids=ODD)
def test_what_makes_no_sense_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"any\.params is damaged .*{reason}"):
        read(data, tmp_path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.params .*No such file"):
        load(tmp_path / "missing.params")


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((), np.float32),
        np.zeros((0, 3), np.float32),
        np.zeros(2, np.uint16),
        np.array(["text"]),
    ],
)
def test_what_mxnet_cannot_hold_is_not_written(value: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot store odd, .* float16"):
        dump(tmp_path / "a", {"even": np.zeros(2), "odd": value})
    assert not (tmp_path / "a").exists()
