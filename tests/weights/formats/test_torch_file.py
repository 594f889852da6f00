"""PyTorch's files hold what PyTorch wrote, bit for bit. Nothing in them is ever run, and damage is
an error."""

import argparse
import os
import pickle
import subprocess
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import dtype_name, numbers
from lockstep.weights.formats.torch_file import is_torch_file, load, save
from lockstep.weights.formats.torch_pickle import Opaque
from lockstep.weights.recognition import read_head
from tests.soak import EXAMPLES
from tests.weights.formats.cases import EDITS, apply_edits
from tests.weights.formats.torch_file_cases import (
    BASE,
    CONTAINERS,
    STATE,
    Ask,
    convert_tensor,
    tensor_of,
    written,
)

TENSORS: dict[str, torch.Tensor] = {
    **{
        str(kind): BASE.to(kind)
        for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    },
    **{
        str(kind): BASE.to(kind)
        for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    },
    "bool": BASE > 1,
    "complex": torch.tensor([1 + 2j]),
    "transposed": BASE.permute(2, 0, 1),
    "part": BASE[1, :, 1::2],
    "expanded": torch.tensor([2.5]).expand(3, 4),
    "bfloat16, transposed": BASE.bfloat16().permute(1, 0, 2)[1:],
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "no axes": torch.tensor(2.5),
    "empty": torch.zeros(3, 0, 2),
    "parameter": torch.nn.Parameter(torch.rand(3)),
}
VALUES: dict[str, tuple[Any, Any]] = {
    "texts and numbers": (
        [1, -(2**70), 2.5, None, True, "ä", b"bytes", 1j],
        [1, -(2**70), 2.5, None, True, "ä", b"bytes", 1j],
    ),
    "nested": ({"a": [{1: (2, ())}], (1, "b"): {}}, {"a": [{1: (2, ())}], (1, "b"): {}}),
    "sets": ({1, "a"}, {1, "a"}),
    "dicts": (
        [OrderedDict(a=1), defaultdict(dict, {"b": 2}), Counter("aa")],
        [{"a": 1}, {"b": 2}, {"a": 2}],
    ),
    "shapes": (torch.Size([2, 3]), (2, 3)),
    "devices": ([torch.device("cpu"), torch.device("cuda", 1)], ["cpu", "cuda:1"]),
    "types": ([torch.float32, torch.bfloat16], ["torch.float32", "torch.bfloat16"]),
    "layouts": (torch.strided, "torch.strided"),
    "options": (
        {"args": argparse.Namespace(lr=0.1, out=PurePosixPath("/a/b"))},
        {"args": {"lr": 0.1, "out": "/a/b"}},
    ),
    "NumPy's numbers": (np.float64(76.5), np.array(76.5)),
    "NumPy's arrays": (np.arange(3), np.arange(3)),
    "a sparse tensor": (torch.eye(2).to_sparse(), Opaque("_rebuild_sparse_tensor")),
}


@CONTAINERS
def test_tensors_of_any_kind_are_read(container: dict[str, bool], tmp_path: Path) -> None:
    arrays = load(written(TENSORS, tmp_path, container))
    assert list(arrays) == list(TENSORS)
    for name, tensor in TENSORS.items():
        value = convert_tensor(tensor)
        read = numbers(arrays[name])
        assert f"torch.{dtype_name(arrays[name].dtype)}" == str(tensor.dtype), name
        assert (read.dtype, read.shape) == (value.dtype, value.shape), name
        assert read.tobytes() == value.tobytes(), name


@CONTAINERS
@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES)
def test_what_programs_store_next_to_tensors_becomes_plain_values(
    value: Any, expected: Any, container: dict[str, bool], tmp_path: Path
) -> None:
    arrays = load(written(value, tmp_path, container))
    if isinstance(expected, np.ndarray):
        assert (arrays.dtype, arrays.tolist()) == (expected.dtype, expected.tolist())
    else:
        assert arrays == expected


@CONTAINERS
def test_repeated_objects_are_read_twice(container: dict[str, bool], tmp_path: Path) -> None:
    numbers = np.arange(3)
    options = argparse.Namespace(lr=0.1)
    arrays = load(written([numbers, options, numbers, options, BASE, BASE], tmp_path, container))
    assert arrays[0].tolist() == [0, 1, 2]
    assert (arrays[2].tolist(), arrays[1], arrays[3]) == ([0, 1, 2], {"lr": 0.1}, {"lr": 0.1})
    assert arrays[4].tolist() == arrays[5].tolist() == BASE.tolist()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    value = {"a": BASE, "s": {1}, "b": b"b", "o": OrderedDict(a=argparse.Namespace(b=1))}
    arrays = load(written(value, tmp_path, pickle_protocol=protocol))
    assert arrays["a"].tolist() == BASE.tolist()
    assert (arrays["s"], arrays["b"], arrays["o"]) == ({1}, b"b", {"a": {"b": 1}})


def test_unsigned_integers_that_older_containers_lack_are_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([1, 65535], dtype=torch.uint16),
        "b": torch.ones(2).to(torch.float8_e4m3fn),
    }
    arrays = load(written(tensors, tmp_path))
    assert (arrays["a"].dtype, arrays["a"].tolist()) == (np.uint16, [1, 65535])
    assert arrays["b"] == Opaque("torch.float8_e4m3fn")


@CONTAINERS
def test_a_state_dict_has_names_of_modules(container: dict[str, bool], tmp_path: Path) -> None:
    arrays = load(written(STATE, tmp_path, container))
    assert (list(arrays), arrays.modules) == (list(STATE), ("", "0", "1"))


ASKED: dict[str, tuple[Any, str]] = {
    "a command": (Ask(os.system, "touch done"), r"(posix|nt)\.system"),
    "a process": (Ask(subprocess.Popen, ["touch", "done"]), r"(subprocess|commands)\.Popen"),
    "code": (Ask(eval, "open('done', 'w')"), r"__builtin__\.eval"),
    "an attribute": (Ask(getattr, (), "__class__"), r"__builtin__\.getattr"),
    "a file": (Ask(open, "done", "w"), r"_?io\.open"),
    "a download": (Ask(torch.hub.load, "a/b", "c"), r"torch\.hub\.load"),
    "a module": (
        torch.nn.Linear(1, 1),
        r"torch\.nn\.modules\.linear\.Linear|an object that is not a storage",
    ),
    "a subclass by any function": (
        Ask(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, ("touch done",), {}),
        r"(posix|nt)\.system",
    ),
    "objects in an array": (np.array([None], object), "an array of type 'O8?'"),
}


@CONTAINERS
@pytest.mark.parametrize(("value", "named"), ASKED.values(), ids=ASKED)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_whatever_else_a_file_asks_for_is_refused_by_name_and_not_done(
    value: Any,
    named: str,
    container: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written({"a": BASE, "b": [value]}, tmp_path, container)
    with pytest.raises(CheckpointError, match=rf"any\.pth asks for ({named}).*malicious"):
        load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["any.pth"]


OUTSIDE: dict[str, tuple[Ask, str]] = {
    "too long": (tensor_of(0, (25,), (1,)), "outside of its storage"),
    "too far": (tensor_of(20, (5,), (1,)), "outside of its storage"),
    "too wide": (tensor_of(0, (2, 3), (22, 1)), "outside of its storage"),
    "no axes": (tensor_of(24, (), ()), "outside of its storage"),
    "backwards": (tensor_of(20, (5,), (-1,)), "an impossible size"),
    "before its storage": (tensor_of(-1, (5,), (1,)), "an offset .* is impossible"),
    "a negative size": (tensor_of(0, (-5,), (1,)), "an impossible size"),
    "more strides than sizes": (tensor_of(0, (5,), (1, 1)), "1 sizes and 2 strides"),
    "huge without bytes": (tensor_of(0, (2**39,), (0,)), "more than 8 times the bytes of the file"),
    "many axes": (tensor_of(0, (1,) * 40, (1,) * 40), "40 axes"),
    "no sizes": (tensor_of(0, None, None), "a NoneType in place of a tuple"),
}


@CONTAINERS
@pytest.mark.parametrize(("value", "reason"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_tensor_cannot_reach_outside_of_its_storage(
    value: Ask, reason: str, container: dict[str, bool], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"any\.pth is damaged .*({reason})"):
        load(written([value], tmp_path, container))


@CONTAINERS
def test_shared_storages_cannot_multiply(container: dict[str, bool], tmp_path: Path) -> None:
    shared = torch.zeros(100_000)
    assert len(load(written([shared[i:] for i in range(5)], tmp_path, container))) == 5
    with pytest.raises(CheckpointError, match="more than 8 times the bytes of the file"):
        load(written([shared[i:] for i in range(50)], tmp_path, container))


ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "float16": np.arange(6, dtype=np.float16).reshape(3, 2, order="F") / 7,
    "int64": np.array(-7),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "big endian": np.arange(3, dtype=">f4"),
}


def test_pytorch_reads_arrays_that_were_written_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path / "a.pth", ARRAYS)
    contents = torch.load(tmp_path / "a.pth", weights_only=True, mmap=True)
    for name, value in ARRAYS.items():
        assert contents[name].numpy().dtype == value.dtype.newbyteorder("<")
        assert contents[name].shape == value.shape
        assert contents[name].is_contiguous()
        assert np.array_equal(contents[name].numpy(), value)


def test_pytorch_reads_plain_values_that_were_written(tmp_path: Path) -> None:
    value = {
        "a": [1, -(2**40), 2.5, None, True, False, "ä" * 300],
        "b": (1, ()),
        7: OrderedDict(z={}, a=[]),
        "c": [],
    }
    save(tmp_path / "a.pth", value)
    contents = torch.load(tmp_path / "a.pth", weights_only=True)
    assert (contents, list(contents[7]), type(contents[7])) == (value, ["z", "a"], OrderedDict)
    assert load(tmp_path / "a.pth") == value


def test_storages_that_were_written_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    save(tmp_path / "a.pth", ARRAYS)
    reader = torch._C.PyTorchFileReader(str(tmp_path / "a.pth"))
    assert not any(reader.get_record_offset(f"data/{i}") % 64 for i in range(len(ARRAYS)))


@pytest.mark.parametrize("value", [{1, 2}, np.array(["a"]), np.zeros(1, np.uint32), b"bytes"])
def test_what_cannot_be_written_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be written to a PyTorch file"):
        save(tmp_path / "a.pth", [value])


@CONTAINERS
@EXAMPLES
@given(edits=EDITS)
def test_whatever_happens_to_a_file_it_is_an_error_or_values(
    edits: list[tuple[float, int, bytes]],
    container: dict[str, bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    others = {"n": np.float64(1), "args": argparse.Namespace(a=1)}
    value = {"state_dict": STATE, "p": torch.nn.Parameter(torch.rand(2)), **others}
    path = written(value, folder, container)
    path.write_bytes(apply_edits(path.read_bytes(), edits))
    with suppress(CheckpointError):
        load(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing cannot be read: No such file"):
        load(tmp_path / "missing")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04N.", pickle.dumps({"a": np.zeros(3)}), b"text", b"PK\x03\x04" + bytes(100)],
    ids=["empty", "pickle", "arrays", "text", "zip"],
)
def test_other_files_are_not_pytorchs(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    assert not is_torch_file(read_head(tmp_path / "a"), tmp_path / "a")
    with pytest.raises(CheckpointError, match="is damaged or not a PyTorch file"):
        load(tmp_path / "a")


@CONTAINERS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_containers_are_recognised_by_their_bytes(
    container: dict[str, bool], protocol: int, tmp_path: Path
) -> None:
    file = written({}, tmp_path, container, pickle_protocol=protocol)
    assert is_torch_file(read_head(file), file)
