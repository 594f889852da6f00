"""Where a run ends before the last step of its schedule: early stopping, decided from the log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.runs.report import Report, compare_with_published, read_report
from lockstep.runs.step_plan import explain_early_stop, find_last_step, leaves_only_probe
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
def test_a_command_stops_after_so_many_more(first: int, how: dict[str, int], step: int) -> None:
    assert find_last_step(first, 100, 10, Execution(**how)) == step


def make_log(*top1: float, ema: float = 0.0, first: int = 10) -> list[dict[str, Any]]:
    """Return the log of a run that was evaluated every 10 steps, also with a moving average."""
    log = []
    for step, value in enumerate(top1):
        entry = {"kind": "evaluate", "step": first + 10 * step, "loss": 1.0, "images": 8}
        log += [entry | {"weights": "trained", "top1_percent": value}]
        log += [entry | {"weights": "ema", "top1_percent": ema}]
    return log


def explain(log: list[dict[str, Any]], step: int, epochs: int = 2, **how: Any) -> str | None:
    recipe = Recipe(early_stopping_epochs=epochs, selection=how.get("by", "top1"))
    per_epoch = how.get("per_epoch", 10)
    run: Any = SimpleNamespace(recipe=recipe, total_steps=1000, steps_per_epoch=per_epoch)
    return explain_early_stop(run, log, step)


@pytest.mark.parametrize(
    ("top1", "stops"),
    [
        ([], False),
        ([50.0], False),
        ([50.0, 40.0], False),
        ([50.0, 40.0, 30.0], True),
        ([50.0, 50.0, 50.0], True),  # equal is not better
        ([0.0, 0.0, 0.0], True),
        ([50.0, 40.0, 60.0], False),
        ([50.0, 40.0, 60.0, 55.0, 59.0], True),
    ],
)
def test_early_stopping_counts_epochs_since_the_best(top1: list[float], stops: bool) -> None:
    assert (explain(make_log(*top1), 10 * len(top1)) is not None) == stops
    assert explain(make_log(*top1), 10 * len(top1), epochs=0) is None


def test_early_stopping_is_decided_at_an_evaluation_alone() -> None:
    log = make_log(50.0, 40.0, 30.0)
    reason = "2 epochs have not improved the top-1; the best is 50.00 % at step 10"
    assert explain(log, 30) == reason
    assert explain(log, 35) is None
    assert explain(log, 20) is None


def test_early_stopping_counts_epochs_and_not_evaluations() -> None:
    log = make_log(50.0, 40.0, 30.0)  # every second epoch, or twice in one
    assert explain(log[:4], 20, per_epoch=5) is not None
    assert explain(log, 30, per_epoch=20) is None


def test_the_evaluation_at_step_0_counts() -> None:
    log = make_log(50.0, 40.0, 30.0, first=0)
    assert "the best is 50.00 % at step 0" in str(explain(log, 20))


def test_a_moving_average_counts_as_the_trained_weights_do() -> None:
    log = make_log(50.0, 40.0)
    log += [event | {"top1_percent": 51.0} for event in make_log(0.0, first=30)[1:]]
    assert explain(log, 30) is None
    assert "step 30 (moving average)" in str(explain([*log, *make_log(0, 0, first=40)], 50))


def test_the_lowest_loss_is_the_best() -> None:
    log = []
    for step, loss in ((10, 2.0), (20, 1.0), (30, 1.5), (40, 1.0)):
        entry = {"kind": "evaluate", "step": step, "weights": "trained", "loss": loss}
        log.append(entry | {"top1_percent": float(step)})
    assert "the best is 1.0000 at step 20" in str(explain(log, 40, by="loss"))
    assert explain(log, 40, by="top1") is None


def test_stopping_early_needs_evaluations(recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="early stopping needs evaluations, but train_only"):
        lockstep.train(recipe, textures, tmp_path, execution=Execution(train_only=True))


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    """Five epochs that change nothing that an evaluation sees."""
    return tiny_recipe.replace(
        epochs=EPOCHS,
        global_batch_images=30,
        lr=1e-12,
        bn_momentum=1e-9,
        warmup_epochs=0,
        early_stopping_epochs=2,
        selection="macro_f1",
    )


@pytest.fixture(scope="module")
def early_end(
    recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Report]:
    """A run that was interrupted at its second evaluation, and ended early at its third when it was
    resumed."""
    run = tmp_path_factory.mktemp("early end") / "run"
    listener = stop_at("evaluate", 2 * PER_EPOCH)
    train_until(listener, recipe, textures, run)
    lockstep.train(recipe, textures, run)
    report = read_report(run)
    assert report is not None
    return run, report


def test_a_resumed_run_ends_as_early(early_end: tuple[Path, Report]) -> None:
    run, report = early_end
    first, *others = read_entries(run, "evaluate")
    assert [entry["step"] for entry in others] == [4, 6]
    assert {entry["top1_percent"] for entry in others} == {first["top1_percent"]}
    assert (report["steps"], report["epochs"]) == (6, 5)
    assert (report["best"]["step"], report["final"]["trained"]["step"]) == (2, 6)
    assert report["stopped_early"].startswith("2 epochs have not improved the macro F1")


def test_a_run_that_ended_early_is_not_compared(early_end: tuple[Path, Report]) -> None:
    _, report = early_end
    final = {"trained": report["final"]["trained"] | {"images": 50_000}}
    recipe = load_recipe("resnet50-paddle-90ep")
    comparison = compare_with_published(recipe, report | {"final": final, "classes": ["a"] * 1000})
    assert comparison is not None
    assert (comparison["accuracies"], comparison["interval_percent"]) == ([], [])
    assert comparison["not_compared"] == "early stopping ended this run before its 90 epochs"


def test_a_run_that_ended_early_is_finished(early_end: tuple[Path, Report]) -> None:
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

    whole = lockstep.train(out=run, changes={"early_stopping_epochs": 9}, listener=listener)
    assert unfinished == [True, True]
    assert (whole["steps"], "stopped_early" in whole) == (10, False)
    assert newest_step(run) == 10


@pytest.mark.parametrize(
    ("changes", "images", "expected"),
    [
        ({}, 10_000, True),
        ({}, 10_001, False),
        ({"frozen": ["layer1"]}, 60, False),
        ({"class_weights": [1, 2]}, 60, False),
        ({"sampling": "balanced"}, 60, False),
        ({"sparsity": "mask_1d"}, 60, False),
        ({"quantisation": "int8"}, 60, False),
        ({"dropout": 0.5}, 60, False),
        ({"cutmix_alpha": 0.2}, 60, False),
        ({"loss": "binary_cross_entropy"}, 60, False),
        ({"flip_probability": 0.5}, 60, False),
        ({"vertical_flip_probability": 0.5}, 60, False),
        ({"crop_area": [0.5, 1]}, 60, False),
        ({"crop_area": [0.5, 1], "crop": "centre"}, 60, True),
        ({"crop": "random"}, 60, False),
        ({"training_interpolation": "random"}, 60, False),
        ({"augmentations": "solarise"}, 60, False),
    ],
    ids=str,
)
def test_a_probe_ends_a_like_run_only(changes: dict[str, Any], images: int, expected: bool) -> None:
    fixed = {"logits": 2, "frozen": ["backbone"], "crop_area": [1, 1], "flip_probability": 0}
    recipe = Recipe.of(fixed | changes)
    run: Any = SimpleNamespace(recipe=recipe, sets=SimpleNamespace(training=range(images)))
    assert leaves_only_probe(run) == expected
