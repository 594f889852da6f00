"""Where a run ends before the last step of its schedule: early stopping, decided from the log."""

from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.runs.last_step import explain_early_stop, find_last_step
from lockstep.runs.report import Report, compare_with_published, read_report
from lockstep.system.errors import RecipeError
from tests.runs.cases import (
    Event,
    list_evaluations,
    newest_step,
    read_entries,
    stop_at,
    train_until,
)

# 60 images, 30 per step
PER_EPOCH = 2
EPOCHS = 5
PATIENT = Execution(early_stopping_patience=2)


@pytest.mark.parametrize(
    ("first", "how", "step"),
    [
        (0, {"stop_after_epochs": 2}, 20),
        (20, {"stop_after_epochs": 2}, 40),
        (24, {"stop_after_epochs": 2}, 40),  # killed within an epoch
        (24, {"stop_after_steps": 7}, 31),
        (24, {"stop_after_steps": 7, "stop_after_epochs": 1}, 30),
        (24, {"stop_after_epochs": 9}, 100),
        (24, {}, 100),
    ],
)
def test_a_command_stops_after_this_many_more_epochs_or_steps(
    first: int, how: dict[str, int], step: int
) -> None:
    assert find_last_step(first, 100, 10, Execution(**how)) == step


def make_log(*top1: float, ema: float = 99.0) -> list[dict[str, Any]]:
    """Return the log of a run that was evaluated at steps 10, 20, ..., also with a moving average
    that improves."""
    log = []
    for number, value in enumerate(top1, start=1):
        entry = {"kind": "evaluate", "step": 10 * number, "loss": 1.0, "images": 8}
        log += [entry | {"weights": "trained", "top1_percent": value}]
        log += [entry | {"weights": "ema", "top1_percent": ema + number / 100}]
    return log


@pytest.mark.parametrize(
    ("top1", "stops"),
    [
        ([], False),
        ([50.0], False),
        ([50.0, 40.0], False),
        ([50.0, 40.0, 30.0], True),
        ([50.0, 50.0, 50.0], True),  # equal is not better
        ([50.0, 40.0, 60.0], False),
        ([50.0, 40.0, 60.0, 55.0, 59.0], True),
    ],
)
def test_early_stopping_counts_the_evaluations_since_the_best_one(
    top1: list[float], stops: bool
) -> None:
    assert (explain_early_stop(make_log(*top1), 10 * len(top1), 2) is not None) == stops
    assert explain_early_stop(make_log(*top1), 10 * len(top1), 0) is None


def test_early_stopping_is_decided_at_an_evaluation_alone() -> None:
    log = make_log(50.0, 40.0, 30.0)
    reason = "the last 2 evaluations are not above the top-1 of 50.00 % at step 10"
    assert explain_early_stop(log, 30, 2) == reason
    assert explain_early_stop(log, 35, 2) is None
    assert explain_early_stop(log, 20, 2) is None


def test_early_stopping_without_evaluations_is_refused() -> None:
    with pytest.raises(RecipeError, match="early stopping needs evaluations; set only one"):
        Execution(train_only=True, early_stopping_patience=2)


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    """Five epochs that change nothing that an evaluation sees."""
    return tiny_recipe.replace(
        epochs=EPOCHS, global_batch_images=30, lr=1e-12, bn_momentum=1e-9, warmup_epochs=0
    )


@pytest.fixture(scope="module")
def early_end(
    recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Report]:
    """A run that was interrupted at its second evaluation, and ended early at its third when it was
    resumed."""
    run = tmp_path_factory.mktemp("early end") / "run"
    listener = stop_at("evaluate", 2 * PER_EPOCH)
    train_until(listener, recipe, textures, run, execution=PATIENT)
    lockstep.train(recipe, textures, run, execution=PATIENT)
    report = read_report(run)
    assert report is not None
    return run, report


def test_a_resumed_run_ends_early_where_an_uninterrupted_one_would(
    early_end: tuple[Path, Report],
) -> None:
    run, report = early_end
    first, *others = read_entries(run, "evaluate")
    assert [entry["step"] for entry in others] == [4, 6]
    assert {entry["top1_percent"] for entry in others} == {first["top1_percent"]}
    assert (report["steps"], report["epochs"]) == (6, 5)
    assert (report["best"]["step"], report["final"]["trained"]["step"]) == (2, 6)
    assert report["stopped_early"].startswith("the last 2 evaluations are not above")


def test_a_run_that_ended_early_is_not_compared_with_published_accuracies(
    early_end: tuple[Path, Report],
) -> None:
    _, report = early_end
    final = {"trained": report["final"]["trained"] | {"images": 50_000}}
    recipe = load_recipe("resnet50-paddle-90ep")
    comparison = compare_with_published(recipe, report | {"final": final, "classes": ["a"] * 1000})
    assert comparison is not None
    assert (comparison["accuracies"], comparison["interval_percent"]) == ([], [])
    assert comparison["not_compared"] == "early stopping ended this run before its 90 epochs"


def test_a_run_that_ended_early_is_finished_until_its_patience_is_raised(
    early_end: tuple[Path, Report], recipe: Recipe, textures: Path
) -> None:
    run, report = early_end
    events: list[Event] = []
    assert lockstep.train(out=run, listener=events.append).items() >= report.items()
    assert "already_finished" in [event["kind"] for event in events]
    (run / "report.json").unlink()  # killed before its report
    assert lockstep.train(out=run)["per_class"] == report["per_class"]
    assert list_evaluations(run) == [2, 4, 6]
    unfinished: list[bool] = []

    def listener(event: Event) -> None:
        if event["kind"] == "train":
            unfinished.append(read_report(run) is None)

    patient = PATIENT.replace(early_stopping_patience=9)
    whole = lockstep.train(recipe, textures, run, execution=patient, listener=listener)
    assert unfinished == [True, True]
    assert (whole["steps"], "stopped_early" in whole) == (10, False)
    assert newest_step(run) == 10
