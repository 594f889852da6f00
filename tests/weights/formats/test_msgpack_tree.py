"""Flax's files hold what was written, and damage is an error. Tests with Flax itself are in
test_peers_of_flax."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.system.errors import CheckpointError
from lockstep.weights import formats
from lockstep.weights.formats import BFLOAT16, msgpack_tree, numbers
from lockstep.weights.formats.msgpack_tree import begins_dict, dump, load
from tests.weights.formats.cases import ARRANGED, assert_stored

KINDS = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_]
ARRAYS = st.sampled_from(KINDS).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=5, max_side=4))
)
TREES = st.dictionaries(
    st.text(max_size=40), ARRAYS | st.dictionaries(st.text(max_size=9), ARRAYS), max_size=20
)
# What Flax 0.12.8 writes: of plain values and an array, of bfloat16 and a scalar, of no values.
PLAIN = (
    "83a6706172616d7381a161c7160193920102a7666c6f61743332c4080000c03f000000c0a473746570cd012ca178"
    "86a13001a131c0a132c3a133fba134cb4004000000000000a135a174"
)
HALF = "82a168c70f019390a862666c6f61743136c402803fa16ed8039390a7666c6f61743332c40400000040"
EMPTY = "81a177c70a01939100a4696e7438c400"
LONG = "81a177c900011182019391ce00011170a575696e7438c600"
"""How the file of 70,000 numbers uint8 begins."""


def read(data: bytes, folder: Path) -> Any:
    (folder / "any.msgpack").write_bytes(data)
    return load(folder / "any.msgpack")


def flat(tree: Any, name: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {name: tree}
    leaves: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{name}/{key!r}")
    return leaves


def array_of(parts: bytes, kind: int = 1) -> bytes:
    """Return a file, made by hand, with one array called x."""
    return b"\x81\xa1x\xc7" + bytes([len(parts), kind]) + parts


def test_what_flax_writes_is_read(tmp_path: Path) -> None:
    tree = read(bytes.fromhex(PLAIN), tmp_path)
    assert_stored({"a": tree["params"].pop("a")}, {"a": np.array([[1.5, -2.0]], np.float32)})
    values = {"0": 1, "1": None, "2": True, "3": -5, "4": 2.5, "5": "t"}
    assert tree == {"params": {}, "step": 300, "x": values}
    tree = read(bytes.fromhex(HALF), tmp_path)
    assert_stored({"n": tree["n"]}, {"n": np.array(2, np.float32)})
    assert (tree["h"].dtype, numbers(tree["h"]).tolist()) == (BFLOAT16, 1.0)


def test_the_bytes_are_those_of_flax(tmp_path: Path) -> None:
    dump(tmp_path / "a", {"w": np.zeros(0, np.int8)})
    assert (tmp_path / "a").read_bytes().hex() == EMPTY
    dump(tmp_path / "a", {"w": np.arange(70000).astype(np.uint8)})
    written = (tmp_path / "a").read_bytes()
    assert (written[:24].hex(), len(written)) == (LONG, 70027)


@settings(max_examples=40)
@given(tree=TREES)
def test_reading_inverts_writing(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("flax") / "any"
    dump(path, tree)
    assert_stored(flat(load(path)), flat(tree))


@pytest.mark.parametrize("value", ARRANGED.values(), ids=ARRANGED)
def test_arrays_of_any_layout_are_written(value: np.ndarray, tmp_path: Path) -> None:
    dump(tmp_path / "a", {"a": value})
    assert np.array_equal(load(tmp_path / "a")["a"], value)


FLOATS = b"\x93\x91\x02\xa7float32"
ODD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "a value needs 1 bytes from byte 0 on, but 0 are left"),
    "more": (b"\x80\xc0", "1 bytes follow its end"),
    "cut off": (b"\x82\xa1x\x01", "a value needs 1 bytes from byte 4 on"),
    "a key that is no text": (b"\x81\x01\x01", "there is byte 0x1 instead of a string"),
    "a key twice": (b"\x82\xa1x\x01\xa1x\x01", "a dict has the key 'x' twice"),
    "a text of other bytes": (b"\x81\xa1\xff\x01", "can't decode byte 0xff"),
    "no value": (b"\x81\xa1x\xc1", "there is byte 0xc1 instead of a string"),
    "too many levels": (b"\x81\xa1x" * 40 + b"\x01", "more than 32 levels"),
    "a claim of many values": (b"\xdd\xff\xff\xff\xff", "a value needs 1 bytes from byte 5 on"),
    "another extension": (array_of(FLOATS, 5), "an extension of type 5"),
    "a complex number": (array_of(b"\x92\x01\x01", 2), "an extension of type 2"),
    "no list": (array_of(b"\x01"), "not a list of its shape"),
    "objects": (array_of(b"\x93\x91\x01\xa6object\xc4\x01x"), "of the type 'object'"),
    "no bytes": (array_of(FLOATS + b"\x05"), "an array is of the type 'float32'"),
    "a list of types": (array_of(b"\x93\x91\x02\x90\xc4\x00"), r"of the type \[\]"),
    "too few bytes": (array_of(FLOATS + b"\xc4\x04abcd"), "cannot reshape"),
    "a part of a number": (array_of(FLOATS + b"\xc4\x05abcde"), "multiple of element size"),
    "a negative size": (array_of(b"\x93\x91\xff\xa7float32\xc4\x00"), r"the shape \[-1\]"),
    "a huge size": (
        array_of(b"\x93\x92\x00\xcf" + b"\xff" * 8 + b"\xa7float32\xc4\x00"),
        r"the shape \[0, 18446744073709551615\]",
    ),
    "too many axes": (
        array_of(b"\x93\xdc\x00\x21" + b"\x01" * 33 + b"\xa7float32\xc4\x00"),
        "more than 32 axes",
    ),
    "bytes after an array": (array_of(FLOATS + b"\xc4\x08abcdefgh\x01"), "1 bytes follow an array"),
    "an array in an array": (
        array_of(b"\x93\x91\xd4\x01\x01\xa7float32\xc4\x00"),
        "not a list of its shape",
    ),
}


@pytest.mark.parametrize(("data", "reason"), ODD.values(), ids=ODD)
def test_what_makes_no_sense_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"any\.msgpack is damaged .*{reason}"):
        read(data, tmp_path)


def test_more_than_weights_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_ARRAYS", 3)
    dump(tmp_path / "a", {str(i): np.zeros(0, np.int8) for i in range(4)})
    with pytest.raises(CheckpointError, match="has 4 arrays; expected at most 3"):
        load(tmp_path / "a")
    monkeypatch.setattr(msgpack_tree, "_MOST_VALUES", 100)
    with pytest.raises(CheckpointError, match="more than 100 values"):
        read(b"\xdc\x00\x64" + b"\x01" * 100, tmp_path)


@pytest.mark.parametrize(
    ("data", "is_dict"),
    [
        (bytes.fromhex(PLAIN), True),
        (b"\xde\x00\x10\xa4step\x01", True),
        (b"", False),
        (b"\x80", False),
        (b"\x80\x02}q\x00.", False),
        (b"\x82\x01\x02\x03\x04", False),
        (b"\x81\xa2\x00\x01\xc0", False),
        (b"PK\x03\x04", False),
    ],
)
def test_a_file_is_known_by_its_first_key(data: bytes, is_dict: bool) -> None:
    assert begins_dict(data) == is_dict
