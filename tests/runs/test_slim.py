"""A finished run can be made small: its best weights stay, and it cannot resume."""

import fcntl
import shutil
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.runs.slim import slim_run
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from tests.runs.cases import EXECUTION, copy_bytes


@pytest.fixture
def run(uninterrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(uninterrupted, tmp_path / "a run"))


def list_files(run: Path) -> dict[str, int]:
    """Return the sizes of the checkpoints' files."""
    files = filter(Path.is_file, (run / "checkpoints").rglob("*"))
    return {str(path.relative_to(run / "checkpoints")): path.stat().st_size for path in files}


def find_best(run: Path) -> Path:
    return open_weights(run).source


def read_bytes(run: Path) -> dict[str, bytes]:
    return copy_bytes(open_weights(run).tensors)


@pytest.mark.parametrize("keeps_newest", [False, True])
def test_a_slim_run_has_its_best_weights_alone(
    keeps_newest: bool, run: Path, tiny_recipe: Recipe, textures: Path
) -> None:
    (run / "checkpoints" / "unfinished-step-00000099").mkdir()
    best = find_best(run).name
    newest = checkpoint.checkpoint_path(Path(), checkpoint.steps(run / "checkpoints")[-1]).name
    tensors = read_bytes(run)
    before = list_files(run)
    _, _, freed, _ = slim_run(run, keeps_newest=keeps_newest)
    kept = {best, newest} if keeps_newest else {best}
    files = list_files(run)
    assert files.keys() == {
        f"{folder}/{name}" for folder in kept for name in ("model.safetensors", "state.json")
    }
    difference = sum(before.values()) - sum(files.values())
    assert freed == pytest.approx(difference, abs=8192 * len(before))  # and folders
    assert difference > sum(before.values()) / 2
    assert read_bytes(run) == tensors
    assert slim_run(run, keeps_newest=keeps_newest)[2] == 0
    report = (run / "report.json").read_bytes()
    for recipe in (tiny_recipe, tiny_recipe.replace(epochs=3)):
        with pytest.raises(CheckpointError, match="cannot resume: `lockstep runs slim` removed"):
            lockstep.train(recipe, textures, run, execution=EXECUTION)
    assert (run / "report.json").read_bytes() == report


@pytest.mark.parametrize("call", ["write_json", "remove", "shutil.rmtree"])
def test_a_killed_call_is_repeated(call: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = read_bytes(run)

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"lockstep.weights.checkpoint.{call}", die)
        with pytest.raises(KeyboardInterrupt):
            slim_run(run)
    assert read_bytes(run) == tensors
    assert slim_run(run)[2] > 0
    assert read_bytes(run) == tensors
    assert len(list_files(run)) == 2


@pytest.mark.parametrize("case", ["in progress", "unfinished", "damaged", "a link", "no run"])
def test_a_run_that_cannot_be_made_small_stays_as_it_is(case: str, run: Path) -> None:
    folder = run / "checkpoints"
    match = case
    if case == "unfinished":
        (run / "report.json").unlink()
        match = "is not a finished run"
    elif case == "damaged":
        file = find_best(run) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    elif case == "a link":
        (folder / "step-00000001").symlink_to(find_best(run))
    elif case == "no run":
        shutil.rmtree(folder)
        match = "is not a finished run"
    else:
        match = "another process is training in"
    before = list_files(run)
    with (run / ".lock").open("w") as lock:
        if case == "in progress":
            fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=match):
            slim_run(run)
    assert list_files(run) == before


def test_a_finished_run_removes_leftovers(run: Path, tiny_recipe: Recipe, textures: Path) -> None:
    left = run / "checkpoints" / "unfinished-step-00000099"
    left.mkdir()
    (left / "model.safetensors").write_bytes(np.zeros(4).tobytes())
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION)
    assert not left.exists()


def test_a_lock_that_is_a_link_is_not_written_through(
    run: Path, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("text")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "a file")
    with pytest.raises(OSError, match="symbolic"):
        slim_run(run)
    with pytest.raises(CheckpointError, match="cannot write to"):
        lockstep.train(tiny_recipe, textures, run, execution=EXECUTION)
    assert (tmp_path / "a file").read_text() == "text"
