"""A bundle holds what was written, for all names and shapes. Damage is an error that names the
file, never a wrong value."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.system.crc import masked_crc
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import tensor_bundle
from lockstep.weights.formats.tensor_bundle import Bundle, data_path, find, index_path, write
from tests.soak import EXAMPLES, SOAK
from tests.weights.formats.cases import EDITS, apply_edits, assert_stored

NAMES = st.text(min_size=1, max_size=40).filter(lambda name: not name.startswith("\0"))
VALUES = st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.int64]).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)
WHOLE: dict[str, np.ndarray] = {
    "resnet50/conv2d/conv2d/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "resnet50/conv2d/conv2d/kernel/Momentum": -np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "resnet50/conv2d/BatchNorm/gamma": np.linspace(0, 1, 9, dtype=np.float64),
    "global_step": np.array(7, np.int64),
}


def contents(prefix: Path) -> dict[str, np.ndarray]:
    bundle = Bundle(prefix)
    return {name: bundle.read(name) for name in bundle.entries}


def contents_or_reason(prefix: Path) -> tuple[dict[str, np.ndarray] | None, str]:
    try:
        return contents(prefix), ""
    except CheckpointError as error:
        return None, str(error)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "model.ckpt-7", WHOLE)
    return tmp_path / "model.ckpt-7"


@EXAMPLES
@given(tensors=st.dictionaries(NAMES, VALUES, max_size=40))
def test_reading_inverts_writing(
    tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("bundle") / "any"
    write(prefix, tensors)
    assert_stored(contents(prefix), tensors)


@EXAMPLES
@given(edits=EDITS, of_index=st.booleans())
def test_whatever_happens_to_a_file_it_is_an_error_or_the_values_are_right(
    edits: list[tuple[float, int, bytes]], of_index: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("damaged") / "any"
    write(prefix, WHOLE)
    path = index_path(prefix) if of_index else data_path(prefix, 0, 1)
    path.write_bytes(apply_edits(path.read_bytes(), edits))
    contents, reason = contents_or_reason(prefix)
    if contents is None:
        assert str(prefix) in reason
    else:
        assert_stored(contents, WHOLE)


@EXAMPLES
@given(data=st.binary(max_size=300), magic=st.booleans())
def test_any_bytes_are_an_error_and_nothing_else(
    data: bytes, magic: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("garbage") / "any"
    index_path(prefix).write_bytes(data + struct.pack("<Q", 0xDB4775248B80FB57) * magic)
    expected = r"any\.index is (damaged or not the index|.*, not weights)"
    with pytest.raises(CheckpointError, match=expected):
        Bundle(prefix)


def test_no_flipped_bit_of_a_file_goes_unnoticed(prefix: Path) -> None:
    """Exceptions: the zeros that pad the footer, and the top bit of the number before them, which
    only adds a zero to it."""
    for path, unread in ((index_path(prefix), 40 - 5), (data_path(prefix, 0, 1), 0)):
        whole = path.read_bytes()
        for offset in range(0, len(whole), 1 if SOAK else 3):
            for bit in (1, 128):
                path.write_bytes(
                    whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :]
                )
                values, _ = contents_or_reason(prefix)
                if values is not None:
                    assert len(whole) - 8 - unread <= offset < len(whole) - 8
                    assert_stored(values, WHOLE)
        path.write_bytes(whole)
    assert_stored(contents(prefix), WHOLE)


def test_a_file_cut_off_anywhere_is_an_error(prefix: Path) -> None:
    for path in (index_path(prefix), data_path(prefix, 0, 1)):
        whole = path.read_bytes()
        for length in range(0, len(whole), 1 if SOAK else 3):
            path.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                contents(prefix)
        path.write_bytes(whole)


def test_the_tensors_in_front_of_a_missing_end_are_still_read(prefix: Path) -> None:
    path = data_path(prefix, 0, 1)
    os.truncate(path, path.stat().st_size - 1)
    bundle = Bundle(prefix)
    assert bundle.read("global_step") == 7
    with pytest.raises(CheckpointError, match="kernel/Momentum: bytes 176 to 272"):
        bundle.read("resnet50/conv2d/conv2d/kernel/Momentum")


def block(contents: bytes, kind: int = 0) -> bytes:
    data = contents + bytes([kind])
    return data + struct.pack("<I", masked_crc(data))


def table(path: Path, pairs: list[tuple[bytes, bytes]], kind: int = 0) -> None:
    """Write a table of short pairs in one block, by hand."""
    entries = b"".join(bytes([0, len(key), len(value)]) + key + value for key, value in pairs)
    restarts = struct.pack("<II", 0, 1)
    first = block(entries + restarts, kind)
    index = block(bytes([0, 1, 2, 0x7F, 0, len(entries + restarts)]) + restarts)
    footer = bytes([len(first), len(index) - 5] * 2).ljust(40, b"\0") + struct.pack(
        "<Q", 0xDB4775248B80FB57
    )
    path.write_bytes(first + index + footer)


HEADER = (b"", bytes([0x08, 1, 0x1A, 2, 0x08, 1]))
ONE = bytes([0x08, 1, 0x28, 4])  # a float32 scalar
CRAFTED: dict[str, tuple[list[tuple[bytes, bytes]], int, str]] = {
    "no header": ([(b"a", ONE)], 0, "it has no header"),
    "compressed": ([HEADER], 1, "is compressed"),
    "not in order": ([HEADER, (b"b", ONE), (b"a", ONE)], 0, "names are not in order"),
    "twice": ([HEADER, (b"a", ONE), (b"a", ONE)], 0, "names are not in order"),
    "big endian": ([(b"", bytes([0x08, 1, 0x10, 1]))], 0, "big endian"),
    "newer": (
        [(b"", bytes([0x08, 1, 0x1A, 2, 0x10, 2]))],
        0,
        "of version 2; expected at most 1",
    ),
    "no message": ([HEADER, (b"a", b"\xff")], 0, "not a message of type Entry"),
    "no text": ([HEADER, (b"\xff", ONE)], 0, "utf-8"),
    "a file of none": ([HEADER, (b"a", ONE + bytes([0x18, 1]))], 0, "its entry for a is not valid"),
    "a negative size": (
        [HEADER, (b"a", bytes([0x08, 1, 0x28]) + b"\xff" * 9 + b"\1")],
        0,
        "its entry for a is not valid",
    ),
    "no rank": (
        [HEADER, (b"a", ONE + bytes([0x12, 2, 0x18, 1]))],
        0,
        "its entry for a is not valid",
    ),
}


@pytest.mark.parametrize(("pairs", "kind", "reason"), CRAFTED.values(), ids=CRAFTED)
def test_an_index_with_right_checksums_that_makes_no_sense_is_refused(
    pairs: list[tuple[bytes, bytes]], kind: int, reason: str, tmp_path: Path
) -> None:
    table(tmp_path / "odd.index", pairs, kind)
    with pytest.raises(CheckpointError, match=f"odd.index is damaged or not .*{reason}"):
        Bundle(tmp_path / "odd")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (bytes([0x08, 1, 0x28, 5]), r"a has 5 bytes, which does not fit its shape \(\)"),
        (bytes([0x08, 99, 0x28, 4]), "a is of type 99;"),
        (bytes([0x08, 5, 0x28, 2]), "a is of type int16"),
    ],
    ids=["size", "unknown type", "other type"],
)
def test_a_senseless_tensor_is_refused(entry: bytes, reason: str, tmp_path: Path) -> None:
    table(tmp_path / "odd.index", [HEADER, (b"a", entry)])
    with pytest.raises(CheckpointError, match=reason):
        Bundle(tmp_path / "odd").read("a")


def test_a_huge_size_is_an_error_and_no_huge_allocation(tmp_path: Path) -> None:
    size = bytes([0x80] * 6 + [0x20])  # 2 to the power of 47
    shape = bytes([0x12, 10, 0x12, 8, 0x08, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x08])
    table(tmp_path / "odd.index", [HEADER, (b"a", bytes([0x08, 1]) + shape + bytes([0x28]) + size)])
    (tmp_path / "odd.data-00000-of-00001").write_bytes(bytes(4))
    with pytest.raises(CheckpointError, match="beyond its end"):
        Bundle(tmp_path / "odd").read("a")


def test_nothing_is_overwritten(prefix: Path) -> None:
    for path in (index_path(prefix), data_path(prefix, 0, 1)):
        with pytest.raises(CheckpointError, match="already exists"):
            write(prefix, {})
        path.unlink()
    write(prefix, {})
    assert contents(prefix) == {}


@pytest.mark.parametrize("name", ["", "\0a"])
def test_names_that_tensorflow_keeps_for_itself_are_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "a", {name: np.zeros(1, np.float32)})


def test_types_that_cannot_be_read_again_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'a' of type complex64 cannot be written"):
        write(tmp_path / "a", {"a": np.zeros(1, np.complex64)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_write_that_fails_leaves_nothing_behind(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:  # the data, its folder, the index, its folder
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"model .*No space left"):
        write(tmp_path / "model", WHOLE)
    assert list(tmp_path.iterdir()) == []


def state(folder: Path, path: str) -> None:
    (folder / "checkpoint").write_text(
        f'model_checkpoint_path: "{path}"\nall_model_checkpoint_timestamps: 1.5\nlast: "x"\n'
    )


def test_a_prefix_any_of_its_files_and_a_folder_name_the_same_checkpoint(prefix: Path) -> None:
    assert find(prefix) == find(prefix.parent) == prefix
    for ending in (".index", ".meta", ".data-00000-of-00001"):
        assert find(prefix.with_name(prefix.name + ending)) == prefix


@pytest.mark.parametrize("path", ["model.ckpt-7", "/elsewhere/run/model.ckpt-7", "./model.ckpt-7"])
def test_the_newest_is_named_by_its_file_also_after_a_move(path: str, prefix: Path) -> None:
    write(prefix.with_name("model.ckpt-9"), WHOLE)
    state(prefix.parent, path)
    assert find(prefix.parent) == prefix


def test_the_file_that_names_the_newest_is_written_and_understood(prefix: Path) -> None:
    write(prefix.with_name("größer 9"), WHOLE)
    tensor_bundle.write_newest(prefix.with_name("größer 9"))
    assert find(prefix.parent) == prefix.with_name("größer 9")


def garble(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(b"\xff\xfe: {{")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "several": (lambda folder: None, "model.ckpt-7, model.ckpt-9 and no file `checkpoint`"),
    "named one is gone": (
        lambda folder: state(folder, "model.ckpt-3"),
        "names 'model.ckpt-3', which does not exist",
    ),
    "no name": (lambda folder: state(folder, ""), "names '', which does not exist"),
    "garbage": (garble, "checkpoint cannot be read"),
    "other text": (
        lambda folder: (folder / "checkpoint").write_text("epoch 7"),
        "checkpoint cannot be read",
    ),
}


@pytest.mark.parametrize(("change", "reason"), ODD.values(), ids=ODD)
def test_a_folder_that_does_not_say_which_is_an_error(
    change: Callable[[Path], object], reason: str, prefix: Path
) -> None:
    write(prefix.with_name("model.ckpt-9"), WHOLE)
    change(prefix.parent)
    with pytest.raises(CheckpointError, match=reason):
        find(prefix.parent)


def test_other_paths_name_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for path in (
        tmp_path,
        tmp_path / "model.safetensors",
        tmp_path / "missing",
        tmp_path / "missing.index",
        tmp_path / ".index",
        Path(),
    ):
        assert find(path) is None


def test_a_file_that_names_the_newest_is_not_replaced(prefix: Path) -> None:
    tensor_bundle.write_newest(prefix)
    with pytest.raises(CheckpointError, match="checkpoint already exists"):
        tensor_bundle.write_newest(prefix.with_name("model.ckpt-9"))
    with pytest.raises(CheckpointError, match="checkpoint cannot be written"):
        tensor_bundle.write_newest(index_path(prefix) / "model.ckpt-9")
    assert find(prefix.parent) == prefix
