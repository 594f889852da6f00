"""Checks of a run's JSON files. Logs and reports are tested in `test_folder`."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Recipe
from lockstep.reporting.collect import open_runs
from lockstep.runs.loggers import Loggers, Opening
from lockstep.runs.shapes import is_environment
from lockstep.system.checks import is_figure, is_rate, parsed
from lockstep.system.errors import CheckpointError
from tests.reporting.cases import write_run

SHAPES: list[Any] = [5, [], "text", None, {"execution": []}, {"train": 5}, {"data": ["a"]}]


@pytest.mark.parametrize("value", SHAPES, ids=repr)
def test_an_environment_of_another_shape_is_named(value: Any, tmp_path: Path) -> None:
    assert not is_environment(value)
    folder = write_run(tmp_path / "run", recipe=Recipe(), classes=["a", "b"])
    (folder / "environment.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"environment\.json is not a run's environment"):
        open_runs([folder])


@pytest.mark.parametrize("text", ["5", "[]", '{"wandb": {}}', '{"wandb": {"key": 5, "sent": {}}}', '{"wa', "[" * 100_000])
def test_what_loggers_noted_of_another_shape_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"loggers\.json is damaged; restore it, or remove it"):
        Loggers((), Opening(tmp_path, 0, {}, None), print)


def test_brackets_that_cannot_be_read_are_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parsed("[" * 100_000)


def test_true_is_no_number_and_null_stands_for_one_that_is_not_finite() -> None:
    assert [is_figure(value) for value in (1, 0.5, None, float("nan"), True, "1", 10**400)] == [True] * 4 + [False] * 3
    assert [is_rate(value) for value in (1, 0.5, 0, -1, float("inf"), float("nan"), None)] == [True] * 2 + [False] * 5
