"""What a run says about ranks that a launcher has started again, and what it tells its launcher."""

import json
import os
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.reading import read_run
from lockstep.system import heartbeat
from lockstep.system.event_log import read_log
from lockstep.system.heartbeat import Beat, Heart, beat_file, read_beat
from lockstep.system.ranks import RESTARTED, find_restart

HALF = Execution(log_every_steps=2, stop_after_steps=3)
WHOLE = Execution(log_every_steps=2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (
            {RESTARTED: json.dumps({"restart": 2, "reason": "rank 1 was killed"})},
            (2, "rank 1 was killed"),
        ),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, (3, "torchrun restarted the ranks")),
    ],
    ids=["not at all", "by launch", "not by torchrun", "by torchrun"],
)
def test_a_rank_knows_whether_it_was_started_again(
    variables: dict[str, str], expected: tuple[int, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert find_restart() == expected


def test_restarts_are_in_the_log_and_the_report(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=1)
    lockstep.train(recipe, textures, run, execution=HALF.replace(train_only=True))
    monkeypatch.setenv(RESTARTED, json.dumps({"restart": 1, "reason": "rank 1 was killed"}))
    report = lockstep.train(recipe, textures, run, execution=WHOLE.replace(train_only=True))
    kinds = [(entry["kind"], entry["step"]) for entry in read_log(run / "log.jsonl", whole=True)]
    assert kinds[:5] == [("start", 0), ("train", 2), ("train", 3), ("start", 3), ("restart", 3)]
    assert kinds[5:] == [("train", 4), ("train", 6), ("train", 7)]
    assert report["restarts"] == 1
    assert "the ranks were restarted 1 time after a failure" in (read_run(run).ending or "")


def test_a_run_reports_to_its_launcher_what_it_does(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beat_file(tmp_path, 0)
    beats: list[tuple[str, int]] = []

    class NotingHeart(Heart):
        def beat(self, *what: object, **how: object) -> None:
            super().beat(*what, **how)  # type: ignore[arg-type]
            beat = read_beat(path) or Beat()
            if (beat.activity, beat.step) not in beats:
                beats.append((beat.activity, beat.step))

    monkeypatch.setattr(heartbeat, "_hearts", [NotingHeart(path)])
    recipe = tiny_recipe.replace(epochs=1)
    execution = Execution(save_every_steps=4, log_every_steps=4)
    lockstep.train(recipe, textures, tmp_path / "run", execution=execution)
    # the start is logged first
    assert beats[:3] == [("saving", 0), ("starting", 0), ("compiling", 1)]
    # An engine may ask for the second batch before it compiles.
    assert [step for activity, step in beats if activity == "training"] == [3, 4, 5, 6, 7]
    assert [step for activity, step in beats if activity == "saving"] == [0, 4, 7]
    assert ("evaluating", 7) in beats
    last = read_beat(path)
    assert last is not None
    # 7 steps and 20 images in batches of 8; the report at the end
    assert (last.activity, last.moves) == ("saving", 7 + 3)
