"""Runs that are copied to an object store: a real S3 server, whose network can fail."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.data.stores import objects
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.runs import resuming
from lockstep.runs.run_copies import copy_run, fetch_run, open_store
from lockstep.system.errors import CheckpointError, DataError, RecipeError
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import read_identity, settle_identity
from tests.data.stores.servers import Server, serve
from tests.processes import wait_until
from tests.runs.cases import STEPS, Event, find_same_parts, stop_at, train_until

PARTS = ["tensors", "momentum", "ema"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("store")
    (root / "bucket").mkdir()
    with serve(root, looks_again=False) as server:
        yield server


@pytest.fixture
def execution(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Execution:
    """An execution that copies to a place of its own."""
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        objects, "_RETRY", {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    )
    objects.connect.cache_clear()
    server.fail = lambda name, wanted: None
    url = f"s3://bucket/{tmp_path.name}"
    return Execution(save_every_steps=3, log_every_steps=1, checkpoint_store=url)


@pytest.fixture(scope="module")
def whole(tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    lockstep.train(tiny_recipe, textures, run)
    return run


def list_copied_steps(server: Server, execution: Execution) -> list[int]:
    """Return the steps of the store's complete checkpoints."""
    folder = server.root / execution.checkpoint_store.removeprefix("s3://") / "checkpoints"
    return [
        step
        for step in checkpoint.steps(folder)
        if (checkpoint.checkpoint_path(folder, step) / "state.json").exists()
    ]


def test_a_run_whose_folder_is_gone_resumes_from_its_copy(
    server: Server,
    execution: Execution,
    tiny_recipe: Recipe,
    textures: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("save", 6), tiny_recipe, textures, run, execution=execution)
    stopped = checkpoint.steps(run / "checkpoints")
    assert list_copied_steps(server, execution) == stopped
    shutil.rmtree(run)
    events: list[Event] = []
    lockstep.train(tiny_recipe, textures, run, execution=execution, listener=events.append)
    [settings] = [event for event in events if event["kind"] == "settings"]
    result = settings["origins"]["copy"]
    assert result == f"the checkpoint of step {stopped[-1]} in {execution.checkpoint_store}"
    assert find_same_parts(run, whole) == PARTS
    assert list_copied_steps(server, execution) == checkpoint.steps(run / "checkpoints")
    copied = server.root / execution.checkpoint_store.removeprefix("s3://")
    for name in ("log.jsonl", "report.json", "recipe.yaml"):
        assert (copied / name).read_bytes() == (run / name).read_bytes()


def test_a_lost_store_does_not_stop_a_run(
    server: Server,
    execution: Execution,
    tiny_recipe: Recipe,
    textures: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    server.fail = lambda name, wanted: "drop" if wanted == "PUT" else None
    events: list[Event] = []
    run = tmp_path / "run"
    lockstep.train(tiny_recipe, textures, run, execution=execution, listener=events.append)
    assert find_same_parts(run, whole) == PARTS
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    assert f"the copy in {execution.checkpoint_store} is not complete" in warnings[-1]
    assert list_copied_steps(server, execution) == []
    server.fail = lambda name, wanted: None
    lockstep.train(tiny_recipe, textures, run, execution=execution)  # is finished, and copies
    assert list_copied_steps(server, execution) == checkpoint.steps(run / "checkpoints")


def test_an_unfinished_copy_of_a_checkpoint_is_not_fetched(
    server: Server,
    execution: Execution,
    tiny_recipe: Recipe,
    textures: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    is_lost = "step-00000006/momentum"
    server.fail = lambda name, wanted: "drop" if wanted == "PUT" and is_lost in name else None
    run = tmp_path / "run"
    train_until(stop_at("save", 6), tiny_recipe, textures, run, execution=execution)
    copied = list_copied_steps(server, execution)
    assert 6 not in copied
    shutil.rmtree(run)
    server.fail = lambda name, wanted: None
    lockstep.train(tiny_recipe, textures, run, execution=execution)
    assert find_same_parts(run, whole) == PARTS


def test_a_killed_run_resumes_from_its_copy(
    server: Server,
    execution: Execution,
    tiny_recipe: Recipe,
    textures: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_recipe.format_yaml())
    run = tmp_path / "run"
    command = [sys.executable, "-m", "lockstep", "train", "--recipe", tmp_path / "tiny.yaml"]
    command += ["--data", textures, "--out", run, "--set", "save_every_steps=3"]
    command += ["--set", f"checkpoint_store={execution.checkpoint_store}"]
    variables = os.environ | server.variables()
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    wait_until(lambda: bool(list_copied_steps(server, execution)) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shutil.rmtree(run)
    report = lockstep.train(tiny_recipe, textures, run, execution=execution)
    assert report["steps"] == STEPS
    assert find_same_parts(run, whole) == PARTS


def test_another_address_or_a_missing_bucket_is_refused(
    execution: Execution, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    elsewhere = execution.replace(checkpoint_store=str(tmp_path / "copy"))
    with pytest.raises(RecipeError, match="expected an address such as s3://BUCKET/RUN"):
        lockstep.train(tiny_recipe, textures, run, execution=elsewhere)
    elsewhere = execution.replace(checkpoint_store="s3://nobucket/run")
    with pytest.raises(DataError, match="s3://nobucket/run cannot be read"):
        lockstep.train(tiny_recipe, textures, run, execution=elsewhere)
    assert not (run / "recipe.yaml").exists()


def list_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, apart from hidden ones, by their paths in it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def find_copy(server: Server, execution: Execution) -> Path:
    """Return the folder of the store that has the copy."""
    return server.root / execution.checkpoint_store.removeprefix("s3://")


def test_a_store_of_another_run_is_refused_before_anything_is_written(
    server: Server, execution: Execution, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train_until(stop_at("save", 3), tiny_recipe, textures, first, execution=execution)
    train_until(
        stop_at("save", 3),
        tiny_recipe,
        textures,
        second,
        execution=execution.replace(checkpoint_store=""),
    )
    before = list_files(second), list_files(find_copy(server, execution))
    with pytest.raises(CheckpointError, match=r"holds a copy of a different run, .*second"):
        lockstep.train(tiny_recipe, textures, second, execution=execution)
    assert (list_files(second), list_files(find_copy(server, execution))) == before
    new = tmp_path / "new"
    with pytest.raises(CheckpointError, match=r"of run \w{32} in .*first; .* add --trust-run"):
        lockstep.train(tiny_recipe, textures, new, execution=execution)
    with pytest.raises(RecipeError, match="seed"):
        lockstep.train(
            tiny_recipe.replace(seed=5), textures, new, execution=execution, trust_run=True
        )
    assert list_files(new) == {}
    assert list_files(find_copy(server, execution)) == before[1]
    lockstep.train(tiny_recipe, textures, new, execution=execution, trust_run=True)
    assert read_identity(new) is not None
    assert read_identity(new).id == read_identity(first).id  # type: ignore[union-attr]


def test_copies_of_a_folder_do_not_share_a_store_once_they_differ(
    server: Server, execution: Execution, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    run, fork = tmp_path / "run", tmp_path / "fork"
    train_until(stop_at("save", 3), tiny_recipe, textures, run, execution=execution)
    shutil.copytree(run, fork)
    lockstep.train(out=run, execution=execution)
    alone = execution.replace(checkpoint_store="", stop_after_steps=2)
    lockstep.train(out=fork, execution=alone)
    before = list_files(fork), list_files(find_copy(server, execution))
    with pytest.raises(CheckpointError, match="their checkpoints of step"):
        lockstep.train(out=fork, execution=execution)
    assert (list_files(fork), list_files(find_copy(server, execution))) == before


def test_a_run_that_starts_at_the_same_moment_is_refused(
    server: Server,
    execution: Execution,
    tiny_recipe: Recipe,
    textures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train_until(stop_at("save", 3), tiny_recipe, textures, first, execution=execution)
    with monkeypatch.context() as patched:  # the store was empty when this run looked
        patched.setattr(resuming, "find_newer_copy", lambda *arguments: {})
        with pytest.raises(
            CheckpointError, match=r"holds a copy of a different run, not of .*second"
        ):
            lockstep.train(tiny_recipe, textures, second, execution=execution)
    assert checkpoint.steps(second / "checkpoints") == []


def test_a_damaged_copy_is_not_moved_into_a_run(
    server: Server, execution: Execution, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("save", 3), tiny_recipe, textures, run, execution=execution)
    shutil.rmtree(run)
    [file, *_] = (find_copy(server, execution) / "checkpoints").glob("*/momentum.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"the checkpoint of step \d+ is damaged"):
        lockstep.train(tiny_recipe, textures, run, execution=execution)
    assert list_files(run) == {}


def test_a_copy_of_a_version_without_ids_is_adopted_once(
    execution: Execution, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("save", 3), tiny_recipe, textures, run, execution=execution)
    open_store(execution.checkpoint_store).delete(["run.json"])
    events: list[Event] = []
    options = execution.replace(stop_after_steps=1)
    lockstep.train(out=run, execution=options, listener=events.append)
    notes = [event["message"] for event in events if event["kind"] == "note"]
    assert [note for note in notes if "did not have an id" in note]
    events.clear()
    lockstep.train(out=run, execution=options, listener=events.append)
    assert not [event for event in events if event["kind"] == "note"]


def test_mixed_checkpoints_are_refused(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    execution = Execution(save_every_steps=3)
    for run in (first, second):
        train_until(stop_at("save", 3), tiny_recipe, textures, run, execution=execution)
    [newest] = checkpoint.steps(first / "checkpoints")[-1:]
    name = checkpoint.checkpoint_path(Path(), newest).name
    shutil.copytree(first / "checkpoints" / name, second / "checkpoints/step-00000009")
    before = list_files(second)
    for command in (
        lambda: lockstep.train(tiny_recipe, textures, second, execution=execution),
        lambda: lockstep.load(second).evaluate(textures).to_json(),
    ):
        with pytest.raises(CheckpointError, match="holds checkpoints of two runs"):
            command()
    assert list_files(second) == before


@pytest.fixture
def copied(execution: Execution, tmp_path: Path) -> Path:
    """The folder of a run of one checkpoint, which is copied."""
    run = tmp_path / "run"
    run.mkdir()
    identity = settle_identity(run)
    state = State(3, {"w": np.zeros(2, np.float32)}, {})
    checkpoint.save(run / "checkpoints", state, data_digest="", about={}, run_id=identity.id)
    (tmp_path / "secret").write_text("secret")
    (run / "notes.txt").symlink_to(tmp_path / "secret")
    (checkpoint.checkpoint_path(run / "checkpoints", 3) / "more").symlink_to(tmp_path / "secret")
    copy_run(run, open_store(execution.checkpoint_store))
    return run


def test_links_in_a_run_are_not_copied(copied: Path, server: Server, execution: Execution) -> None:
    own = ["checkpoints/step-00000003/model.safetensors", "checkpoints/step-00000003/state.json"]
    assert [*list_files(find_copy(server, execution))] == [*own, "run.json"]


def test_jobs_of_an_array_with_one_path_are_different_runs(
    copied: Path, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    settle_identity(copied)
    copy_run(copied, open_store(execution.checkpoint_store))
    shutil.rmtree(copied)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    with pytest.raises(CheckpointError, match=r"run, task 0 of an array; .* add --trust-run"):
        fetch_run(execution.checkpoint_store, copied, lambda run: None, is_trusted=False)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")  # queued again
    assert fetch_run(execution.checkpoint_store, copied, lambda run: None, is_trusted=False) == 3


def test_planted_links_are_not_fetched(copied: Path, execution: Execution, tmp_path: Path) -> None:
    shutil.rmtree(copied)
    copied.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.json").write_text("mine")
    for name in (".fetched", ".fetched.unfinished"):
        (copied / name).symlink_to(outside)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        fetch_run(execution.checkpoint_store, copied, lambda run: None, is_trusted=False)
    assert list_files(outside) == {"run.json": b"mine"}
    assert list_files(copied) == {}


def test_a_checkpoint_of_another_name_is_not_fetched(copied: Path, execution: Execution) -> None:
    store = open_store(execution.checkpoint_store)
    store.write_file("checkpoints/step-000000003/planted", copied / "run.json")
    store.write_file("checkpoints/step-000000003/state.json", copied / "run.json")
    shutil.rmtree(copied)
    assert fetch_run(execution.checkpoint_store, copied, lambda run: None, is_trusted=False) == 3
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_store_that_is_no_text_is_refused_as_a_field(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"checkpoint_store: .* not None"):
        resuming.complete_settings(tmp_path / "run", data=tmp_path, how={"checkpoint_store": None})
