"""Runs that are copied to an object store: a real S3 server, whose network can fail."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import lockstep
from lockstep.data.stores import objects
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import DataError, RecipeError
from lockstep.weights import checkpoint
from tests.data.stores.servers import Server, serve
from tests.processes import ONE_THREAD, wait_until
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
    assert settings["origins"]["copy"] == (
        f"the checkpoint of step {stopped[-1]} in {execution.checkpoint_store}"
    )
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
    variables = os.environ | ONE_THREAD | server.variables()
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
