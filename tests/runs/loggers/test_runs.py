"""Complete runs of a tiny model, with a logger that records its calls in place of Weights & Biases."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.loggers import LOGGERS, Kind
from lockstep.runs.report import read_report
from lockstep.system.errors import Interrupted, UserError
from lockstep.system.event_log import read_log
from tests.backends.conftest import BACKENDS
from tests.runs.cases import tensorboard_events
from tests.runs.loggers.conftest import Notebook

EXECUTION = Execution(
    backend="torch" if "torch" in BACKENDS else BACKENDS[0],
    log_every_steps=1,
    loggers=("tensorboard", "wandb"),
)


@pytest.fixture
def noted(noting: Notebook, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.setitem(
        sys.modules, "lockstep.runs.loggers.wandb", sys.modules["lockstep.runs.loggers.noting"]
    )
    monkeypatch.setitem(LOGGERS, "wandb", LOGGERS["noting"])
    return noting


@pytest.fixture
def recipe(tiny_recipe: Recipe) -> Recipe:
    """A run of seven steps."""
    return tiny_recipe.replace(epochs=1)


def test_a_stopped_run_goes_on_in_the_same_place_and_every_step_is_there_once(
    noted: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    def stop_at_3(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION, listener=stop_at_3)
    lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    (first, about), (second, _) = noted.of("open")
    assert (first, second) == (None, "key 0")
    assert about["epochs"] == 1
    assert about["ranks"] == 1
    assert [outcome for (outcome,) in noted.of("close")] == ["stopped", "finished"]
    steps = [step for values, step in noted.of("figures") if "train/loss" in values]
    assert steps == list(range(1, 8))
    logged = {
        entry["step"]: entry["loss"]
        for entry in read_log(tmp_path / "run" / "log.jsonl")
        if entry["kind"] == "train"
    }
    assert {step: v["train/loss"] for v, step in noted.of("figures") if "train/loss" in v} == logged
    assert [
        step for values, step in noted.of("figures") if "val_trained/top1_percent" in values
    ] == [7]


def test_the_worst_mistakes_are_shown_at_the_end(
    noted: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    report = lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    wrong = min(
        16,
        sum(report["per_class"]["trained"]["images"]) - sum(report["per_class"]["trained"]["top1"]),
    )
    assert noted.of("images") == [[[f"mistakes/{number:02d}" for number in range(1, wrong + 1)], 7]]
    values = [
        value
        for event in tensorboard_events(tmp_path / "run")
        for value in event.summary.value
        if value.HasField("image")
    ]
    assert [value.tag[:11] for value in values] == [
        f"mistakes/{number:02d}" for number in range(1, wrong + 1)
    ]
    assert all("_taken_for_" in value.tag for value in values)
    assert {(value.image.height, value.image.width) for value in values} == {(32, 32)}


def test_images_that_cannot_be_read_any_more_do_not_end_a_finished_run(
    noted: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(textures, data)
    told: list[dict[str, Any]] = []

    def lose_images(event: dict[str, Any]) -> None:
        told.append(event)
        if event["kind"] == "evaluate":
            shutil.rmtree(data / "val")

    report = lockstep.train(
        recipe, data, tmp_path / "run", execution=EXECUTION, listener=lose_images
    )
    assert read_report(tmp_path / "run") is not None
    assert report["steps"] == 7
    assert told[-1]["kind"] == "finish"
    (warning,) = [event["message"] for event in told if event["kind"] == "warning"]
    assert warning.startswith("the worst mistakes cannot be shown: ")
    assert noted.of("images") == []
    assert noted.of("close") == [["finished"]]


def test_predictions_on_noise_are_not_shown_over_images(
    noted: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    report = lockstep.train(
        recipe, textures, tmp_path / "run", execution=EXECUTION.replace(loader="synthetic")
    )
    assert sum(report["per_class"]["trained"]["images"]) > sum(
        report["per_class"]["trained"]["top1"]
    )
    assert noted.of("images") == []


@pytest.mark.parametrize("call", ["open", "figures", "images", "close"])
def test_a_logger_that_fails_does_not_end_the_training(
    call: str, noted: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    noted.fails_at = {call}
    warned: list[str] = []
    report = lockstep.train(
        recipe,
        textures,
        tmp_path / "run",
        execution=EXECUTION,
        listener=lambda event: (
            warned.append(event["message"]) if event["kind"] == "warning" else None
        ),
    )
    assert report["steps"] == 7
    assert warned == ["wandb failed and gets nothing more of this run: OSError: the disk is full"]


def test_a_missing_package_is_an_error_before_the_first_step(
    recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        LOGGERS, "wandb", Kind(("no-such-client",), "pip install it", forgets=False)
    )
    with pytest.raises(UserError, match="no-such-client: pip install it"):
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    assert not (tmp_path / "run").exists()


def test_without_loggers_there_is_the_log_alone(
    recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION.replace(loggers=()))
    assert read_log(tmp_path / "run" / "log.jsonl")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "loggers.json").exists()
