"""Commands for an engine that has a separate environment, run from this environment."""

import json
import math
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import backends
from lockstep.recipes import Recipe
from lockstep.system.event_log import read_log
from tests.processes import call, finish, room_for, running, wait_until
from tests.soak import in_a_soak

Answer = Callable[..., tuple[int, str, str]]

STUB = """#!/bin/sh
echo "$$" >> "{folder}/started"
case "$2" in -c) exit {imports};; esac
for argument in "$@"; do printf '%s\\n' "$argument"; done
echo "to the errors" >&2
exit 42
"""

TRAIN = ["train", "--data", "images", "--out", "new-run"]


@pytest.fixture(autouse=True)
def mxnet_is_elsewhere() -> None:
    assert backends.FRAMEWORKS["mxnet"].version() is None, (
        "these tests are for an environment without MXNet"
    )


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that sets LOCKSTEP_MXNET_PYTHON to a script that records its calls, and returns
    the records' folder."""

    def make(imports: int = 0) -> Path:
        python = tmp_path / "a folder" / "python"
        python.parent.mkdir()
        python.write_text(STUB.format(folder=tmp_path, imports=imports))
        python.chmod(0o755)
        monkeypatch.setenv("LOCKSTEP_MXNET_PYTHON", str(python))
        return tmp_path

    return make


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--recipe", "demo", "--data", "my data", "--out", "x 'y'", "--backend", "mxnet"],
        ["evaluate", "a run", "--data", "d", "--backend=mxnet"],
        ["predict", "a.jpg", "--run", "r", "--backend", "mxnet"],
        shlex.split("launch -n 2 -- train --recipe demo --data d --out o --backend mxnet"),
        shlex.split("launch -n 2 --backend mxnet -- train --recipe demo --data d --out o"),
    ],
    ids=lambda arguments: " ".join(arguments[:4]),
)
def test_the_python_with_the_engine_runs(stub: Callable[..., Path], arguments: list[str]) -> None:
    stub()
    code, output, errors = call(*arguments)
    assert (code, errors) == (42, "to the errors\n")
    assert output.splitlines() == ["-P", "-m", "lockstep", *arguments]


def test_a_command_for_an_engine_here_stays(stub: Callable[..., Path], tmp_path: Path) -> None:
    folder = stub()
    assert call("evaluate", tmp_path / "none", "--data", tmp_path, "--backend", "torch")[0] == 2
    assert not (folder / "started").exists()


def test_a_python_without_lockstep_is_named(stub: Callable[..., Path]) -> None:
    folder = stub(imports=1)
    code, output, errors = call("evaluate", "run", "--data", "d", "--backend", "mxnet")
    assert (code, output) == (2, "")
    assert f"{folder / 'a folder' / 'python'} cannot import lockstep" in errors


def test_a_python_without_the_engine_is_asked_once(
    stub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stub()
    monkeypatch.setenv("LOCKSTEP_WENT_WHERE_INSTALLED", "mxnet")  # as the other Python finds it
    code, _, errors = call("launch", "-n", 2, "--backend", "mxnet", "--", *TRAIN)
    assert code == 2
    assert "backend 'mxnet' needs mxnet" in errors
    assert not (folder / "started").exists()


def test_a_missing_engine_is_told(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_MXNET_PYTHON", raising=False)
    monkeypatch.setattr(backends, "find_interpreter", lambda name: None)
    code, _, errors = answer("launch", "-n", 2, "--backend", "mxnet", "--", *TRAIN)
    assert code == 2
    assert "make mxnet-env" in errors


def test_a_wrong_variable_ends_no_list(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_MXNET_PYTHON", "/no/such/python")
    code, output, _ = answer("doctor")
    assert code == 0
    assert "mxnet      LOCKSTEP_MXNET_PYTHON is '/no/such/python'" in output
    assert "\ntorch " in output


@pytest.mark.slow
def test_mxnet_stops_and_resumes(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "a recipe.yaml"
    run = tmp_path / "a run"
    prefix = tmp_path / "for mxnet" / "model"
    recipe.write_text(tiny_recipe.replace(epochs=8).format_yaml())
    how = ["--backend", "mxnet", "--model-prefix", prefix]
    command = ["train", *how, "--recipe", recipe, "--data", textures, "--out", run]
    with running(*command, "--set", "save_every_steps=5", room=room_for(5)) as process:
        wait_until(lambda: bool(checkpoints(run)))
        os.kill(process.pid, signal.SIGTERM)
        code, _, errors = finish(process)
    assert code == 75, errors
    assert "stopped by SIGTERM" in errors
    code, output, errors = call(*command, "--set", "save_every_steps=5")
    assert (code, errors) == (0, "")
    assert "resuming after step" in output
    assert (
        len(
            [
                loss
                for entry in read_log(run / "log.jsonl")
                if entry["kind"] == "train"
                for loss in entry["losses"]
            ]
        )
        == 56
    )
    assert json.loads((run / "environment.json").read_text())["numpy"].startswith("1.23.")
    written = sorted(path.name for path in prefix.parent.glob("*[0-9].params"))
    assert written == [f"model-{epoch:04d}.params" for epoch in range(1, 9)]


@pytest.mark.slow
# the images and labels of such files are compared in `tests/data/containers/test_peers.py`
@in_a_soak
def test_mxnet_trains_alike_on_our_and_im2recs_files(textures: Path, tmp_path: Path) -> None:
    assert call("data", "pack", textures, tmp_path / "lockstep", "--format", "recordio")[0] == 0
    im2rec(textures, tmp_path / "im2rec")
    changes = {
        "epochs": 2,
        "global_batch_images": 20,
        "logits": 10,
        "model": "resnet18",
        "lr_scaling": "none",
        "lr": 0.001,
    }
    changes |= {
        "image_size": 32,
        "eval_crop": 32,
        "eval_resize": 36,
        "precision": "fp32",
        "log_every_steps": 1,
    }
    settings = [text for name, value in changes.items() for text in ("--set", f"{name}={value}")]
    losses = []
    for source in ("lockstep", "im2rec"):
        command = [
            "train",
            "--backend",
            "mxnet",
            "--recipe",
            "resnet50-mxnet-90ep",
            "--data",
            tmp_path / source,
        ]
        code, _, errors = call(*command, "--out", tmp_path / f"run {source}", *settings)
        assert (code, errors) == (0, "")
        entries = read_log(tmp_path / f"run {source}" / "log.jsonl")
        losses.append(
            [entry["loss"] for entry in entries if entry["kind"] in ("train", "evaluate")]
        )
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    assert all(map(math.isfinite, losses[0]))


def im2rec(images: Path, folder: Path) -> None:
    """Pack images with MXNet's own tool, in MXNet's environment."""
    python = backends.find_interpreter("mxnet")
    assert python is not None, "make mxnet-env"
    find = (
        "import importlib.util;"
        " print(importlib.util.find_spec('mxnet').submodule_search_locations[0])"
    )
    package = subprocess.run(
        [python, "-c", find], capture_output=True, text=True, check=True
    ).stdout.strip()
    tool = Path(package) / "tools" / "im2rec.py"
    folder.mkdir()
    for split in ("train", "val"):
        for options in (["--list", "--recursive"], ["--pass-through", "--num-thread", "1"]):
            command = [python, tool, *options, folder / split, images / split]
            subprocess.run(command, check=True, capture_output=True)


def checkpoints(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob("step-*"))


def test_another_graph_is_refused(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(tiny_recipe.format_yaml())
    (tmp_path / "model-symbol.json").write_text("{}")
    places = ["--data", textures, "--out", tmp_path / "run", "--model-prefix", tmp_path / "model"]
    command = ["train", "--recipe", recipe, *places]
    code, _, errors = call(*command)
    assert code == 2
    assert "already exists with a different graph" in errors
    assert not checkpoints(tmp_path / "run")
