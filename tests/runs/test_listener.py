"""Tests for the events that a listener gets, and for what happens when it raises."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import lockstep
from lockstep import Event
from lockstep.recipes import Recipe
from tests.runs.cases import EXECUTION, assert_same_run, read_entries, read_losses


def test_events_have_the_types_that_are_public_and_raising_stops_a_run_that_resumes(
    tiny_recipe: Recipe, textures: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    events: list[Event] = []

    def prune(event: Event) -> None:
        if event["kind"] == "evaluate":
            raise ZeroDivisionError("pruned")

    with pytest.raises(ZeroDivisionError, match="pruned") as stopped:
        lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=prune)
    assert "raised this error on an event of kind evaluate" in stopped.value.__notes__[0]
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=events.append)
    assert_same_run(run, uninterrupted)

    kinds = {}
    for kind in get_args(Event):
        for name in get_args(get_type_hints(kind)["kind"]):
            kinds[name] = kind
    for event in events:
        assert kinds[event["kind"]].__required_keys__ <= set(event)
    assert {"start", "train", "save", "evaluate", "finish"} <= {event["kind"] for event in events}


def test_a_run_is_read_as_arrays(uninterrupted: Path) -> None:
    run = lockstep.read_run(str(uninterrupted))
    assert run.losses.tolist() == read_losses(uninterrupted)
    entries = read_entries(uninterrupted, "evaluate")
    evaluated = [entry for entry in entries if entry["weights"] == "trained"]
    curve = run.curves["trained"]
    assert curve["step"].tolist() == [entry["step"] for entry in evaluated]
    assert curve["top1_percent"].tolist() == [entry["top1_percent"] for entry in evaluated]
    assert run.curves["train"]["lr"].tolist()[-1] == read_entries(uninterrupted, "train")[-1]["lr"]
    assert lockstep.load(run.best_checkpoint).path == run.best_checkpoint
    assert run.report is not None
    assert lockstep.learning_rates(run.recipe, 2).shape == (2 * run.recipe.epochs,)
