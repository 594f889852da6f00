"""What a run records of its environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Recipe
from lockstep.reporting.page import render
from lockstep.runs.environment import read_environment
from lockstep.runs.loggers import Loggers, Opening
from lockstep.runs.reading import read_run
from lockstep.runs.resuming import complete_settings
from lockstep.runs.train import run_training
from lockstep.system.errors import CheckpointError
from tests.runs.cases import EXECUTION, Event, assert_same_run, read_notes, stop_at, train_until


@pytest.mark.parametrize(
    "value", [5, [], "text", None, {"execution": []}, {"train": 5}, {"data": ["a"]}], ids=repr
)
def test_an_environment_of_another_shape_is_named(value: Any, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"environment\.json is not a run's environment"):
        read_environment(tmp_path)


@pytest.mark.parametrize(
    "text", ["5", "[]", '{"wandb": {}}', '{"wandb": {"key": 5, "sent": {}}}', '{"wa', "[" * 100_000]
)
def test_what_loggers_noted_of_another_shape_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text(text)
    message = r"loggers\.json is damaged; restore it, or remove it"
    with pytest.raises(CheckpointError, match=message):
        Loggers((), Opening(tmp_path, 0, {}, None), print)


def test_a_resume_that_needs_nothing_of_a_damaged_environment_goes_on(
    uninterrupted: Path, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("save", 9), tiny_recipe, textures, run, execution=EXECUTION)
    for text in ('{"execution": 5}', "[]", ""):
        (run / "environment.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"environment\.json"):
            complete_settings(run)
        assert render([read_run(run)])
        settings = complete_settings(run, tiny_recipe, textures, how={"log_every_steps": 2})
    events: list[Event] = []
    run_training(settings, listener=events.append)
    assert_same_run(run, uninterrupted)
    assert any("environment.json was damaged" in note for note in read_notes(events))
    assert read_environment(run)["data"] == str(textures)
