"""Paddle files hold what was written, by any program. Nothing in them is ever run, and damage is an
error."""

import codecs
import os
import pickle
import struct
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import paddle_pickle
from lockstep.weights.formats.format_list import HEAD_BYTES
from lockstep.weights.formats.paddle_pickle import Contents, dump, load
from tests.soak import EXAMPLES
from tests.weights.formats.cases import ARRANGED, assert_stored, list_names, zeros
from tests.weights.formats.torch_file_cases import Ask

KINDS = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint16, np.bool_]
VALUES = st.sampled_from(KINDS).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)
NAMED_VALUES = st.dictionaries(
    st.text(max_size=20).filter(lambda name: "@@" not in name), VALUES, max_size=10
)
WHOLE: dict[str, np.ndarray] = {
    "conv2d_0.w_0": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "batch_norm_0.w_1": np.linspace(0, 1, 3, dtype=np.float16),
    "num_good_steps_0": np.array([7], np.int32),
}


def read(data: bytes, folder: Path) -> Contents:
    (folder / "any.pdparams").write_bytes(data)
    return load(folder / "any.pdparams")


@EXAMPLES
@given(values=NAMED_VALUES)
def test_what_was_written_is_read_bit_for_bit_here_and_by_pickle_itself(
    values: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("paddle") / "any.pdparams"
    dump(path, values)
    assert_stored(load(path).arrays, values)
    assert_stored(pickle.loads(path.read_bytes(), encoding="latin1"), values)


@EXAMPLES
@given(values=NAMED_VALUES)
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_that_numpy_pickled_are_read_at_every_protocol_of_paddles(
    protocol: int, values: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_stored(
        read(pickle.dumps(values, protocol), tmp_path_factory.mktemp("paddle")).arrays, values
    )


def test_nothing_that_some_numpy_has_not_is_named_in_what_is_written(tmp_path: Path) -> None:
    dump(tmp_path / "a", WHOLE)
    data = (tmp_path / "a").read_bytes()
    assert b"ndarray" in data
    assert not any(word in data for word in (b"multiarray", b"_core", b"_reconstruct", b"dtype"))


@pytest.mark.parametrize("value", [*ARRANGED.values(), zeros(0, 3)], ids=[*ARRANGED, "empty"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_of_any_layout_are_read(value: np.ndarray, protocol: int, tmp_path: Path) -> None:
    array = read(pickle.dumps({"a": value}, protocol), tmp_path).arrays["a"]
    assert (array.shape, array.dtype) == (value.shape, value.dtype)
    assert np.array_equal(array, value)
    dump(tmp_path / "b", {"a": value})
    assert np.array_equal(load(tmp_path / "b").arrays["a"], value)


def test_names_of_numpys_modules_are_read_old_and_new(tmp_path: Path) -> None:
    data = pickle.dumps({"a": WHOLE["conv2d_0.w_0"]}, 2)
    old = b"numpy.core.multiarray"
    new = b"numpy._core.multiarray"
    for theirs in (data.replace(new, old), data.replace(old, new)):
        assert np.array_equal(read(theirs, tmp_path).arrays["a"], WHOLE["conv2d_0.w_0"])


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_tensors_with_the_names_of_their_parameters_are_read(protocol: int, tmp_path: Path) -> None:
    weight = WHOLE["conv2d_0.w_0"]
    tensors = {
        "conv.weight": Ask(tuple, ("conv2d_0.w_0", weight)),
        "epoch": 3,
        "lr": {"last": 0.1, "other": None},
    }
    weights = read(pickle.dumps(OrderedDict(tensors), protocol), tmp_path)
    assert_stored(weights.arrays, {"conv.weight": weight})
    assert weights.parameters == {"conv.weight": "conv2d_0.w_0"}
    assert weights.others == ("epoch", "lr")


def test_a_table_of_parameters_beside_arrays_is_read(tmp_path: Path) -> None:
    table = {"conv.weight": "conv2d_0.w_0", "gone": "gone_0"}
    weights = read(
        pickle.dumps({"conv.weight": np.zeros(2), "StructuredToParameterName@@": table}, 2),
        tmp_path,
    )
    assert (weights.parameters, weights.others) == ({"conv.weight": "conv2d_0.w_0"}, ())


def test_tensors_of_static_programs_are_read_without_evaluating_anything(tmp_path: Path) -> None:
    tensor = Ask(eval, "data", {"data": WHOLE["conv2d_0.w_0"]})
    assert_stored(
        read(pickle.dumps({"a": tensor}, 4), tmp_path).arrays, {"a": WHOLE["conv2d_0.w_0"]}
    )


def test_scalars_are_arrays_without_axes(tmp_path: Path) -> None:
    assert_stored(
        read(pickle.dumps({"a": np.float64(7)}, 4), tmp_path).arrays, {"a": np.array(7.0)}
    )


def slice_array(value: np.ndarray, names: list[str]) -> dict[str, Any]:
    """Return what Paddle stores for an array that is too big for the protocol."""
    about = {"a": {"OriginShape": value.shape, "slices": names}}
    parts = np.array_split(value.ravel(), 3)
    return {f"a@@.{i}": part for i, part in enumerate(parts)} | {
        "UnpackBigParamInfor@@": about,
        "b": np.zeros(2),
    }


def test_an_array_in_slices_is_put_together(tmp_path: Path) -> None:
    value = np.arange(35, dtype=np.float32).reshape(5, 7)
    weights = read(pickle.dumps(slice_array(value, ["a@@.0", "a@@.1", "a@@.2"]), 2), tmp_path)
    assert_stored(weights.arrays, {"a": value, "b": np.zeros(2)})


ARRAY = np.zeros(2)
ASKED: dict[str, tuple[Any, str]] = {
    "a command": (Ask(os.system, "touch {}"), r"(posix|nt)\.system"),
    "a process": (Ask(subprocess.Popen, ["touch", "{}"]), r"subprocess\.Popen"),
    "code": (Ask(eval, "__import__('os').system('touch {}')"), r"builtins\.eval of an expression"),
    "code with names": (
        Ask(eval, "data", {"data": 1, "__builtins__": {}}),
        r"builtins\.eval of an expression",
    ),
    "more code": (Ask(exec, "open('{}', 'w')"), r"builtins\.exec"),
    "an attribute": (Ask(getattr, (), "__class__"), r"builtins\.getattr"),
    "an import": (Ask(__import__, "os"), r"builtins\.__import__"),
    "a file": (Ask(open, "{}", "w"), r"_?io\.open"),
    "values of a file": (Ask(np.fromfile, "/etc/passwd"), r"numpy.*\.fromfile"),
    "a string's encoding": (Ask(codecs.lookup, "latin1"), r"_codecs\.lookup"),
    "a class": (CheckpointError("text"), r"lockstep\.system\.errors\.CheckpointError"),
    "a set": ({1, 2}, "an object by EMPTY_SET|builtins.set"),
    "objects in an array": (np.array([None, "text"], object), "an array of type 'O8?'"),
    "text in an array": (np.array(["text"]), "an array of type 'U4'"),
    "a record": (np.zeros(2, [("a", "f4")]), "an array of type 'V4'"),
    "complex numbers": (np.zeros(2, np.complex64), "an array of type 'c8'"),
    "dates": (np.zeros(2, "M8[s]"), "an array of type 'M8'"),
    "a class of arrays": (np.zeros(2).view(np.recarray), r"numpy\.(rec\.)?recarray"),
}


def place_value(value: Any, where: str) -> Any:
    return {
        "as it is": value,
        "as an array": {"a": value},
        "as a parameter": {"a": Ask(tuple, ("name", value))},
        "deep inside": {"a": ARRAY, "b": [({"c": value},)]},
        "as a name": {"StructuredToParameterName@@": {"a": value}},
    }[where]


@pytest.mark.parametrize(
    ("where", "protocol"),
    [
        ("as it is", 2),
        ("as an array", 4),
        ("as a parameter", 4),
        ("deep inside", 2),
        ("as a name", 4),
    ],
)
@pytest.mark.parametrize(("value", "named"), ASKED.values(), ids=ASKED)
def test_whatever_else_a_file_asks_for_is_refused_by_name_and_not_done(
    value: Any,
    named: str,
    protocol: int,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {key: dict(vars(call)) for key, call in paddle_pickle._CALLS.items()}
    named = named if protocol > 2 else ""  # protocol 2 uses Python 2's names
    with pytest.raises(CheckpointError, match=rf"any\.pdparams asks for ({named}).*malicious"):
        read(pickle.dumps(place_value(value, where), protocol), tmp_path)
    assert list_names(tmp_path.iterdir()) == ["any.pdparams"]
    assert {key: dict(vars(call)) for key, call in paddle_pickle._CALLS.items()} == before


def program(*parts: bytes) -> bytes:
    """Return a pickle made by hand."""
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


NDARRAY = call("numpy", "ndarray")
NESTED = b")" + b"\x85" * 200_000
MIB = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20 + b"\x940"
ODD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a pickle of protocol 2"),
    "no pickle": (b"PK\x03\x04 something else", "not a pickle of protocol 2"),
    "no dict": (pickle.dumps([1, 2], 4), "it has a list in place of a dict"),
    "a number for a name": (program(b"}K\x01N", b"s"), "it has a int in place of a str"),
    "a nested name": (program(b"}", NESTED, b"N", b"s"), "it has a tuple in place of a str"),
    "nested lists": (program(b"]" * 300_000 + b"a" * 299_999), "it has a list in place of a dict"),
    "a list of itself": (program(b"}", text("a"), b"]\x94h\x00a", b"s"), ""),
    "a far memo": (program(b"}r\xff\xff\xff\x7f"), ""),
    "nothing in the memo": (program(b"h\x07"), "7"),
    "an empty stack": (program(b"0"), "pop from empty list"),
    "no mark": (program(b"t"), "pop from empty list"),
    "a huge string": (program(b"\x8d" + struct.pack("<Q", 2**62)), "damaged"),
    "huge bytes": (program(b"\x8e" + struct.pack("<Q", 2**40)), "damaged"),
    "huge frame": (program(b"\x95" + struct.pack("<Q", 2**62) + b"}"), ""),
    "a huge array": (
        program(NDARRAY, b"(J\xff\xff\xff\x7f\x85", text("<f4"), b"C\x04aaaa", b"tR"),
        "array of .* has 4 bytes",
    ),
    "an array without end": (
        program(NDARRAY, b"(K\x00\x8a\x0a" + b"\xff" * 9 + b"\x00\x86", text("<f4"), b"C\x00tR"),
        "an impossible size",
    ),
    "a negative size": (
        program(NDARRAY, b"(J\xff\xff\xff\xff\x85", text("<f4"), b"C\x00tR"),
        "an impossible size",
    ),
    "too many axes": (
        program(NDARRAY, b"((" + b"K\x01" * 70 + b"t", text("<f4"), b"C\x04aaaatR"),
        "70 axes",
    ),
    "no text encoded": (
        program(call("_codecs", "encode"), b"K\x07", text("latin1"), b"\x86R"),
        "a int in place of a str",
    ),
    "another encoding": (
        program(call("_codecs", "encode"), text("a"), text("zip"), b"\x86R"),
        "not encoded as latin1",
    ),
    "too few arguments": (program(call("_codecs", "encode"), b")R"), "missing 2 required"),
    "a call of no function": (program(text("a"), b")R"), "a str in place of a _Global"),
    "a function's state": (program(NDARRAY, b")}\x86b"), "sets the state of a _Global"),
    "a function's attributes": (
        program(NDARRAY, b"N}", text("__defaults__"), b")s\x86b"),
        "sets the state of a _Global",
    ),
    "an array without values": (
        program(
            b"}",
            text("a"),
            call("numpy.core.multiarray", "_reconstruct"),
            NDARRAY,
            b"K\x00\x85C\x01b\x87Rs",
        ),
        "a NoneType in place of a ndarray",
    ),
    "one text in many arrays": (
        program(MIB, *[call("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R"] * 2),
        "more bytes than it has",
    ),
    "too many instructions": (program(b"N0" * 500_001), "more than 1000000 instructions"),
    "slices that are not there": (
        pickle.dumps(slice_array(np.zeros((5, 7)), ["a@@.0", "a@@.7"]), 2),
        "a@@.7",
    ),
    "a slice twice": (pickle.dumps(slice_array(np.zeros((5, 7)), ["a@@.0"] * 3), 2), "a@@.0"),
    "slices of another size": (
        pickle.dumps(slice_array(np.zeros((5, 7)), ["a@@.0"]), 2),
        "cannot reshape",
    ),
    "slices of nothing": (pickle.dumps({"UnpackBigParamInfor@@": {"a": {}}}, 2), "slices"),
}


@pytest.mark.parametrize(("data", "reason"), ODD.values(), ids=ODD)
def test_what_makes_no_sense_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    if not reason:
        assert read(data, tmp_path).arrays == {}
        return
    with pytest.raises(CheckpointError, match=rf"any\.pdparams .*({reason})"):
        read(data, tmp_path)


def test_arrays_that_share_their_bytes_may_not_take_more_than_the_file(tmp_path: Path) -> None:
    shared = np.zeros(1000)
    with pytest.raises(CheckpointError, match="its arrays have more bytes than its own"):
        read(pickle.dumps({str(i): shared for i in range(100)}, 4), tmp_path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing cannot be read: No such file"):
        load(tmp_path / "missing")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_is_recognised_by_how_it_begins(protocol: int) -> None:
    big = np.zeros(10_000, np.float32)
    for value, is_its in (
        ({"a": big}, True),
        ({}, True),
        ({1: big}, False),
        ([big], False),
        ("a", False),
        (big, False),
    ):
        head = pickle.dumps(value, protocol)[:HEAD_BYTES]
        assert paddle_pickle.is_paddle(head) == is_its
    text_with_escape = b"PK\x03\x04\\}\n"  # an archive that is also a pickle of protocol 0
    for other in (b"", b"\x80", b"\x80\x04}", text_with_escape, b"not a pickle"):
        assert not paddle_pickle.is_paddle(other)
