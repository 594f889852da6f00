"""Complete runs of a tiny model: what they write, how they stop and resume."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.runs.reading import read_run
from lockstep.weights import checkpoint
from tests.runs.cases import (
    EXECUTION,
    STEPS,
    Event,
    assert_same_run,
    list_evaluations,
    newest_step,
    read_entries,
    stop_at,
    train_until,
)


def test_a_run_reports_exact_counts(uninterrupted: Path) -> None:
    report = json.loads((uninterrupted / "report.json").read_text())
    assert report["final"]["trained"]["images"] == 20
    assert report["per_class"]["trained"]["images"] == [2] * 10
    hits = sum(report["per_class"]["trained"]["top1"])
    assert report["final"]["trained"]["top1_percent"] == 100 * hits / 20


def test_a_published_recipe_on_other_images_is_not_compared(uninterrupted: Path) -> None:
    published = json.loads((uninterrupted / "report.json").read_text())["published"]
    assert (published["recipe"], published["accuracies"]) == ("resnet50-paddle-90ep", [])
    assert published["not_compared"].endswith("these are 10 and 20")


def test_the_log_has_every_step_and_its_rate(uninterrupted: Path, tiny_recipe: Recipe) -> None:
    entries = read_entries(uninterrupted, "train")
    steps: list[int] = []
    for entry in entries:
        steps += range(entry["first_step"], entry["step"])
    assert steps == list(range(STEPS))
    # step 2 of the 7 steps in which the rate grows to 0.05
    assert entries[1]["lr"] == pytest.approx(0.05 * 2 / 7)
    assert list_evaluations(uninterrupted) == [7, 14]


def test_a_finished_run_started_again_changes_nothing(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe
) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in uninterrupted.rglob("*")
        if path.suffix in (".jsonl", ".safetensors")
    }
    kinds: list[str] = []
    report = lockstep.train(
        tiny_recipe, textures, uninterrupted, listener=lambda event: kinds.append(event["kind"])
    )
    assert report.items() >= json.loads((uninterrupted / "report.json").read_text()).items()
    assert "already_finished" in kinds
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.parametrize("step", [1, 5, 7, 10])
def test_a_run_stopped_by_sigterm_resumes_bit_for_bit(
    step: int, uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    every_step = EXECUTION.replace(log_every_steps=1)
    listener = stop_at("train", step)
    stopped = train_until(listener, tiny_recipe, textures, run, execution=every_step)
    assert stopped.exit_code == 75
    assert step <= newest_step(run) <= step + 2
    loading = EXECUTION.replace(loader_threads=5, loader_batches=1)
    lockstep.train(tiny_recipe, textures, run, execution=loading)
    assert_same_run(run, uninterrupted)


def test_a_run_in_parts_gives_bit_identical_weights(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for part, step, evaluated in (
        ({"stop_after_steps": 4}, 4, []),
        ({"stop_after_epochs": 1}, 7, [7]),
    ):
        events: list[Event] = []
        how = {
            "execution": EXECUTION.replace(save_every_steps=0, **part),
            "listener": events.append,
        }
        assert lockstep.train(tiny_recipe, textures, run, **how) == {}
        results = read_run(run).results
        assert evaluated == ([] if results is None else [results.step])
        assert events[-1] == {"kind": "pause", "step": step, "total": STEPS, "out": str(run)}
        assert newest_step(run) == step
        assert list_evaluations(run) == evaluated
        assert not (run / "report.json").exists()
    report = lockstep.train(out=run)  # to the end: parts are of one command alone
    assert_same_run(run, uninterrupted)
    whole = json.loads((uninterrupted / "report.json").read_text())
    assert report["per_class"] == whole["per_class"]


def test_ctrl_c_saves_with_130(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    listener = stop_at("train", number=signal.SIGINT)
    stopped = train_until(listener, tiny_recipe, textures, tmp_path / "run", execution=EXECUTION)
    assert stopped.exit_code == 130
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")


MIXED = {"mixup_alpha": 0.2}
BY_SAMPLE = {"mixup_coefficient": "sample", "mixup_pairing": "reverse"}


@pytest.mark.parametrize(
    ("changes", "accumulation_steps"),
    [
        (MIXED | {"padding": "same", "logits": 11, "precision": "bf16"}, 1),
        (MIXED | BY_SAMPLE | {"antialias": True, "ema_decay": 0.99}, 2),
        ({"precision": "fp16", "loss_scaling": "dynamic"}, 1),
        ({"image_sizes": [[0, 48], [1, 32]], "eval_flips": True, "stochastic_depth": 0.5}, 2),
    ],
    ids=str,
)
def test_every_kind_of_run_resumes_bit_for_bit(
    changes: dict[str, Any],
    accumulation_steps: int,
    textures: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
) -> None:
    recipe = tiny_recipe.replace(**changes)
    execution = EXECUTION.replace(accumulation_steps=accumulation_steps)
    lockstep.train(recipe, textures, tmp_path / "whole", execution=execution)
    listener = stop_at("train", 4, signal.SIGUSR1)
    train_until(listener, recipe, textures, tmp_path / "parts", execution=execution)
    lockstep.train(recipe, textures, tmp_path / "parts", execution=execution)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
