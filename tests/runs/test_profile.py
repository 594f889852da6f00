"""`Execution.profile_step`: some steps run under the framework's profiler, and this does not change
any result."""

from pathlib import Path

import lockstep
from lockstep.recipes import Execution, Recipe
from tests.backends.conftest import BACKENDS
from tests.runs.cases import (
    STEPS,
    Event,
    assert_same_run,
    read_entries,
    read_notes,
    tensorboard_figures,
)

EXECUTION = Execution(backend="torch" if "torch" in BACKENDS else BACKENDS[0], log_every_steps=2)


def test_a_trace_changes_no_numbers(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    lockstep.train(tiny_recipe, textures, tmp_path / "plain", execution=EXECUTION)
    traced = EXECUTION.replace(profile_step=3, profile_steps=2)
    lockstep.train(
        tiny_recipe, textures, tmp_path / "run", execution=traced, listener=events.append
    )
    assert_same_run(tmp_path / "run", tmp_path / "plain")
    folder = tmp_path / "run" / "profile" / "step-00000003"
    assert [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    (trace,) = [event for event in events if event["kind"] == "trace"]
    assert (trace["first_step"], trace["last_step"], trace["path"]) == (3, 4, str(folder))
    entries = read_entries(tmp_path / "run", "train")
    assert [entry["first_step"] for entry in entries if entry.get("traced")] == [3]
    charted = tensorboard_figures(tmp_path / "run")
    assert ("train/loss", 5) in charted
    assert ("train/images_per_sec", 5) not in charted
    assert ("train/images_per_sec", 6) in charted


def test_traced_steps_have_no_speed(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    plain = lockstep.train(tiny_recipe, textures, tmp_path / "plain", execution=EXECUTION)
    assert plain["images_per_sec"] > 0
    every = EXECUTION.replace(profile_step=0, profile_steps=STEPS)
    traced = lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=every)
    assert traced["images_per_sec"] is None


def test_missing_steps_are_noted(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    late = EXECUTION.replace(profile_step=99)
    lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=late, listener=events.append)
    assert read_notes(events) == [
        "steps 99 to 99 are not traced: this command trains steps 0 to 13"
    ]
    assert not (tmp_path / "run" / "profile").exists()
