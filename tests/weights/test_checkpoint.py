"""A checkpoint is either complete or absent, whatever happens to the process or to its files."""

import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint
from tests.soak import in_a_soak
from tests.weights.formats.cases import bits

ABOUT = {"recipe": {"epochs": 3}, "classes": ["café", "tea"]}
FILES = (
    *("model.safetensors", "momentum.safetensors", "ema.safetensors"),
    *("second_moments.safetensors", "state.json"),
)


def state_of(step: int, *, ema: bool = True, scaler: bool = True) -> State:
    """Return a state, with `ema` also with second moments."""
    random = np.random.default_rng(step)
    odd = np.array([np.nan, -0.0, 1e-45, np.inf, 1 / 3], np.float32)
    tensors = {
        "conv1.weight": random.standard_normal((4, 3, 3, 3), np.float32),
        "bn1.running_var": odd,
    }
    velocity = {"conv1.weight": random.standard_normal((4, 3, 3, 3), np.float32)}
    averages = {name: value * np.float32(0.1) for name, value in tensors.items()} if ema else {}
    scale = {"scale": 128.1, "good_steps": 7, "bad_steps": 0} if scaler else {}
    squares = {name: value**2 for name, value in velocity.items()} if ema else {}
    return State(step, tensors, velocity, averages, scale, squares)


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, state_of(step), data_digest=f"images of {step}", about=ABOUT)


def assert_same(state: State | None, expected: State) -> None:
    assert state is not None
    assert (state.step, state.scaler) == (expected.step, expected.scaler)
    assert bits(state.tensors) == bits(expected.tensors)
    assert bits(state.momentum) == bits(expected.momentum)
    assert bits(state.ema) == bits(expected.ema)
    assert bits(state.second_moments) == bits(expected.second_moments)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("ema", [True, False], ids=["with averages", "without averages"])
@pytest.mark.parametrize("scaler", [True, False], ids=["with a loss scale", "without a loss scale"])
def test_what_was_saved_is_loaded_bit_for_bit(ema: bool, scaler: bool, tmp_path: Path) -> None:
    state = state_of(12, ema=ema, scaler=scaler)
    path = checkpoint.save(tmp_path / "checkpoints", state, data_digest="abc", about=ABOUT)
    loaded, data_digest = checkpoint.load(path)
    assert_same(loaded, state)
    assert data_digest == "abc"
    assert path == checkpoint.checkpoint_path(tmp_path / "checkpoints", 12)
    assert path.name == "step-00000012"


def test_weights_are_a_safetensors_file_with_recipe_and_classes(tmp_path: Path) -> None:
    path = save(tmp_path, 3) / "model.safetensors"
    arrays = load_file(path)
    assert bits(arrays) == bits(state_of(3).tensors)
    with safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["lockstep"]) == ABOUT


def test_no_file_of_averages_is_written_where_there_are_none(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state_of(1, ema=False), data_digest="", about=ABOUT)
    names = sorted(file.name for file in path.iterdir())
    assert names == ["model.safetensors", "momentum.safetensors", "state.json"]


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte flipped": lambda path: flip(path, 0),
    "a byte in the middle flipped": lambda path: flip(path, path.stat().st_size // 2),
    "last byte flipped": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_skipped(name: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path, 8)
    newest = save(tmp_path, 16)
    DAMAGES[damage](newest / name)
    state, data_digest, reasons = checkpoint.newest_intact(tmp_path)
    assert_same(state, state_of(8))
    assert data_digest == "images of 8"
    assert len(reasons) == 1
    assert str(newest) in reasons[0]
    assert "damaged" in reasons[0]
    assert name in reasons[0]


def test_no_flipped_bit_of_the_description_goes_unnoticed(tmp_path: Path) -> None:
    file = save(tmp_path, 8) / "state.json"
    whole = file.read_bytes()
    for offset in range(len(whole)):
        flip(file, offset)
        with pytest.raises(CheckpointError):
            checkpoint.load(file.parent)
        file.write_bytes(whole)
    checkpoint.load(file.parent)


@pytest.mark.parametrize(
    "garbage", ["", "hello", "[]", "{}", "null", "7", '{"sha256": []}', "\0" * 500, "{}\n{}"]
)
def test_a_description_of_garbage_is_an_error(garbage: str, tmp_path: Path) -> None:
    path = save(tmp_path, 8)
    (path / "state.json").write_text(garbage)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


def test_if_all_checkpoints_are_damaged_each_is_named(tmp_path: Path) -> None:
    flip(save(tmp_path, 8) / "momentum.safetensors", 40)
    (save(tmp_path, 16) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoint.newest_intact(tmp_path)
    expected = "no checkpoint can be read.*step-00000016.*step-00000008/momentum"
    assert re.search(expected, str(error.value), re.DOTALL)


def test_without_any_checkpoint_there_is_no_state_and_no_complaint(tmp_path: Path) -> None:
    assert checkpoint.newest_intact(tmp_path) == (None, "", [])
    assert checkpoint.newest_intact(tmp_path / "missing") == (None, "", [])


def test_names_of_other_things_are_no_checkpoints(tmp_path: Path) -> None:
    for name in (
        *("step-abc", "step-", "step-00000007-copy", "step-7", "unfinished-step-00000032"),
        *("step--0000001", "other"),
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000064").write_text("a file")
    assert checkpoint.steps(tmp_path) == []
    save(tmp_path, 20)
    save(tmp_path, 123_456_789)
    assert checkpoint.steps(tmp_path) == [20, 123_456_789]


def test_a_failed_rename_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 8)

    def refuse(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000016 .*No space left"):
        save(tmp_path, 16)
    assert checkpoint.steps(tmp_path) == [8]
    assert_same(checkpoint.newest_intact(tmp_path)[0], state_of(8))


def test_an_intact_checkpoint_of_the_same_step_is_not_touched(tmp_path: Path) -> None:
    path = save(tmp_path, 8)
    before = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()}
    assert save(tmp_path, 8) == path
    after = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()}
    assert after == before


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 8)
    flip(save(tmp_path, 16) / "model.safetensors", -1)
    save(tmp_path, 16)
    state, _, reasons = checkpoint.newest_intact(tmp_path)
    assert_same(state, state_of(16))
    assert reasons == []


def test_a_damaged_later_checkpoint_is_not_counted(tmp_path: Path) -> None:
    save(tmp_path, 8)
    flip(save(tmp_path, 16) / "model.safetensors", -1)
    save(tmp_path, 12)
    checkpoint.prune(tmp_path, keep=1, best=None)
    assert checkpoint.steps(tmp_path) == [12]
    assert_same(checkpoint.newest_intact(tmp_path)[0], state_of(12))


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (1, None, [40]),
        (2, None, [30, 40]),
        (2, 10, [10, 30, 40]),
        (2, 40, [30, 40]),
        (1, 30, [30, 40]),
        (9, None, [10, 20, 30, 40]),
        (1, 99, [40]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    keep: int, best: int | None, left: list[int], tmp_path: Path
) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "unfinished-step-00000050").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoint.prune(tmp_path, keep, best)
    assert checkpoint.steps(tmp_path) == left
    kept = [f"step-{step:08d}" for step in left]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", *kept]


TOUCHES_FILES = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"),
    "os.fsync",
}
KILLED = 9
FAILED = 1


def ends_before(point: int, work: Callable[[], object]) -> bool:
    """Do work in a process that dies just before its file access number `point`; return whether it
    reached that point."""
    child = os.fork()
    if child == 0:
        touched = count(1)
        fsync = os.fsync

        def watch(event: str, arguments: object) -> None:
            if event in TOUCHES_FILES and next(touched) == point:
                os._exit(KILLED)

        def watch_fsync(descriptor: int) -> None:
            watch("os.fsync", ())
            fsync(descriptor)

        try:
            sys.addaudithook(watch)
            os.fsync = watch_fsync
            work()
            os._exit(0)
        finally:
            os._exit(FAILED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def save_and_prune(folder: Path, step: int) -> None:
    save(folder, step)
    checkpoint.prune(folder, keep=1, best=None)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "damaged", "saved", "possible"),
    [
        pytest.param([8], [], 16, {8, 16}, id="the next step"),
        pytest.param([8], [], 8, {8}, id="the same step again"),
        pytest.param([8, 16], [16], 16, {8, 16}, id="a damaged step again", marks=in_a_soak),
        pytest.param([8, 16], [16], 12, {8, 12}, id="a step before a damaged one"),
        pytest.param([], [], 8, {None, 8}, id="the first step", marks=in_a_soak),
    ],
)
def test_a_process_killed_at_any_point_of_saving_leaves_the_newest_checkpoint_readable(
    before: list[int], damaged: list[int], saved: int, possible: set[int | None], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for step in before:
        save(whole, step)
    for step in damaged:
        flip(checkpoint.checkpoint_path(whole, step) / "ema.safetensors", -1)
    steps = []
    for point in count(1):
        folder = tmp_path / f"killed before {point}"
        shutil.copytree(whole, folder)
        killed = ends_before(point, partial(save_and_prune, folder, saved))
        state = checkpoint.newest_intact(folder)[0]
        steps.append(state.step if state else None)
        if state:
            assert_same(state, state_of(state.step))
        save_and_prune(folder, saved)
        assert [path.name for path in folder.iterdir()] == [f"step-{saved:08d}"]
        assert_same(checkpoint.newest_intact(folder)[0], state_of(saved))
        if not killed:
            break
    assert len(steps) > 5
    assert set(steps) == possible


FLOAT8 = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "safetensors"),
        (b"not tensors at all", "safetensors"),
        (struct.pack("<Q", len(FLOAT8)) + FLOAT8 + bytes(2), "tensors of F8_E4M3; convert"),
    ],
    ids=["missing", "empty", "text", "float8"],
)
def test_other_files_are_no_weights(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"weights.safetensors.*{reason}"):
        checkpoint.read_weights(path)


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    values = {
        "a": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(-2.5).bfloat16(),
        "b": torch.randn(4),
        "c": torch.arange(3),
    }
    safetensors.torch.save_file(values, tmp_path / "a.safetensors")
    tensors, _ = checkpoint.read_weights(tmp_path / "a.safetensors")
    assert tensors.keys() == values.keys()
    for name, value in values.items():
        kind = torch.int64 if name == "c" else torch.float32
        assert str(tensors[name].dtype) == str(kind).removeprefix("torch.")
        assert np.array_equal(tensors[name], value.to(kind).numpy())


def test_a_cut_off_file_of_weights_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(1).tensors, path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is not"):
        checkpoint.read_weights(path)


def test_weights_of_another_program_have_no_note(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    tensors, about = checkpoint.read_weights(tmp_path / "a.safetensors")
    assert tensors["a"].tolist() == [1, 1, 1]
    assert about is None
