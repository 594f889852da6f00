"""Evaluations within a run: interrupted, repeated, and of a moving average."""

import signal
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Recipe
from tests.runs.cases import (
    EXECUTION,
    assert_same_run,
    is_evaluating,
    list_evaluations,
    newest_step,
    read_entries,
    stop_at,
    stop_when,
    train_until,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_evaluation_that_a_signal_stops_is_repeated(
    number: signal.Signals, uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    listener = stop_when(is_evaluating, number)
    stopped = train_until(listener, tiny_recipe, textures, run, execution=EXECUTION)
    assert stopped.exit_code == 75
    assert list_evaluations(run) == []
    assert newest_step(run) == 7
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION)
    assert list_evaluations(run) == [7, 14]
    assert_same_run(run, uninterrupted)


def test_a_stop_at_the_end_can_finish(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=1)
    train_until(stop_when(is_evaluating), recipe, textures, run)
    report = lockstep.train(recipe, textures, run)
    assert report["final"]["trained"]["images"] == 20


@pytest.mark.parametrize("logged", [0, 1, 2])
def test_a_run_killed_before_its_report_evaluates_its_last_step_once_more(
    logged: int, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(ema_decay=0.9, epochs=1)
    whole = lockstep.train(recipe, textures, run)
    (run / "report.json").unlink()
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(lines[: len(lines) - 2 + logged]))
    again = lockstep.train(recipe, textures, run)
    weights = [entry["weights"] for entry in read_entries(run, "evaluate")]
    assert weights == ["trained", "ema"]
    assert again["per_class"] == whole["per_class"]
    assert again["final"]["ema"]["loss"] == whole["final"]["ema"]["loss"]


def test_missed_evaluations_are_made(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(ema_decay=0.9)
    train_until(stop_at("evaluate"), recipe, textures, run)
    lockstep.train(recipe, textures, run)
    evaluations = [(entry["step"], entry["weights"]) for entry in read_entries(run, "evaluate")]
    assert evaluations == [(7, "trained"), (7, "ema"), (14, "trained"), (14, "ema")]


def test_averages_are_evaluated(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9, epochs=1)
    report = lockstep.train(recipe, textures, tmp_path / "run")
    assert set(report["final"]) == {"trained", "ema"}
    assert report["final"]["trained"]["loss"] != report["final"]["ema"]["loss"]
