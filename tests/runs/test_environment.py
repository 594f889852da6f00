"""What a run records of its environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs.environment import read_environment
from lockstep.runs.loggers import Loggers, Opening
from lockstep.system.errors import CheckpointError


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
    with pytest.raises(
        CheckpointError, match=r"loggers\.json is damaged; restore it, or remove it"
    ):
        Loggers((), Opening(tmp_path, 0, {}, None), print)
