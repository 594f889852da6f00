"""`Execution.profile_step`: some steps run under the framework's profiler, and this does not change
any result."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.intervals import plan_intervals
from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from tests.backends.conftest import BACKENDS
from tests.runs.cases import figures

EXECUTION = Execution(backend="torch" if "torch" in BACKENDS else BACKENDS[0], log_every_steps=2)
STEPS = 14  # 60 images, 8 per step, 2 epochs


def weights(run: Path) -> dict[str, bytes]:
    folder = checkpoint.checkpoint_path(run / "checkpoints", STEPS)
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "momentum.safetensors")
    return {name: value.tobytes() for name, value in tensors.items()}


def losses(run: Path) -> list[float]:
    return [
        loss
        for entry in read_log(run / "log.jsonl")
        if entry["kind"] == "train"
        for loss in entry["losses"]
    ]


@pytest.mark.parametrize(
    ("changes", "stops", "traced"),
    [
        ({}, [4, 8, 10, 12, 16, 20], []),
        ({"profile_step": 5, "profile_steps": 2}, [4, 5, 7, 8, 10, 12, 16, 20], [(5, 7)]),
        (
            {"profile_step": 0, "profile_steps": 9},
            [9, 10, 12, 16, 20],
            [(0, 9)],
        ),  # one trace, across log entries
        (
            {"profile_step": 8, "profile_steps": 4},
            [4, 8, 10, 12, 16, 20],
            [(8, 10), (10, 12)],
        ),  # an epoch ends in between
        ({"profile_step": 30}, [4, 8, 10, 12, 16, 20], []),
    ],
)
def test_traced_steps_are_intervals_of_their_own(
    changes: dict[str, int], stops: list[int], traced: list[tuple[int, int]]
) -> None:
    found = list(plan_intervals(0, 20, 10, Execution(log_every_steps=4, **changes)))
    assert [span.stop for span in found] == stops
    assert [(span.first, span.stop) for span in found if span.traced] == traced


def test_a_traced_run_has_the_same_weights_and_losses_and_a_trace(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    heard: list[dict[str, Any]] = []
    lockstep.train(tiny_recipe, textures, tmp_path / "plain", execution=EXECUTION)
    traced = EXECUTION.replace(profile_step=3, profile_steps=2)
    lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=traced, listener=heard.append)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    folder = tmp_path / "run" / "profile" / "step-00000003"
    assert [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    (told,) = [event for event in heard if event["kind"] == "trace"]
    assert (told["first_step"], told["last_step"], told["path"]) == (3, 4, str(folder))
    entries = [
        entry for entry in read_log(tmp_path / "run" / "log.jsonl") if entry["kind"] == "train"
    ]
    assert [entry["first_step"] for entry in entries if entry.get("traced")] == [3]
    charted = figures(tmp_path / "run")
    assert ("train/loss", 5) in charted
    assert ("train/images_per_sec", 5) not in charted
    assert ("train/images_per_sec", 6) in charted


def test_traced_steps_do_not_count_for_speed(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    plain = lockstep.train(tiny_recipe, textures, tmp_path / "plain", execution=EXECUTION)
    assert plain["images_per_sec"] > 0
    every = EXECUTION.replace(profile_step=0, profile_steps=STEPS)
    traced = lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=every)
    assert traced["images_per_sec"] is None


def test_steps_that_there_are_not_are_a_note(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    heard: list[dict[str, Any]] = []
    late = EXECUTION.replace(profile_step=99)
    lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=late, listener=heard.append)
    (start,) = [event for event in heard if event["kind"] == "start"]
    assert start["notes"] == ["steps 99 to 99 are not traced: this run has steps 0 to 13"]
    assert not (tmp_path / "run" / "profile").exists()
