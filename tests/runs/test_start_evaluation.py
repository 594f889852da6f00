"""The weights that a run starts from are evaluated before its first step."""

from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.reporting.collect import open_runs
from lockstep.reporting.views import build_views
from lockstep.weights import checkpoint
from tests.runs.cases import read_entries

CPU = Execution(keep_checkpoints=1)


@pytest.fixture(scope="module")
def trained(textures: Path, tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    lockstep.train(tiny_recipe.replace(epochs=2), textures, run, execution=CPU)
    return run


def start(
    trained: Path, textures: Path, recipe: Recipe, out: Path, **options: Any
) -> tuple[list[int], list[str]]:
    """Train from weights; return the steps of the evaluations, and what is noted."""
    messages = []
    listener = lambda event: messages.append(event.get("message", ""))  # noqa: E731
    execution = options.pop("execution", CPU)
    lockstep.train(
        recipe, textures, out, weights=trained, execution=execution, listener=listener, **options
    )
    return [entry["step"] for entry in read_entries(out, "evaluate")], messages


def test_given_weights_are_evaluated_and_stay(
    trained: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps, _ = start(trained, textures, tiny_recipe.replace(epochs=3), run)
    assert steps == [0, 7, 14, 21]
    first = read_entries(run, "evaluate")[0]
    expected = lockstep.load(trained).evaluate(textures).to_json()
    assert first["loss"] == pytest.approx(expected["loss"])
    assert first["top1_percent"] == expected["top1_percent"]
    assert checkpoint.steps(run / "checkpoints")[0] == 0
    result = lockstep.load(run, checkpoint="0").evaluate(textures).to_json()["loss"]
    assert result == expected["loss"]


def test_a_training_that_ends_below_its_start_says_so_and_keeps_it(
    trained: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # the initial weights of this rate are worse than any
    _, messages = start(trained, textures, tiny_recipe.replace(epochs=1, lr=30.0), run)
    report = lockstep.train(out=run)
    first = read_entries(run, "evaluate")[0]
    assert report["best"] is not None
    assert (report["best"]["step"], report["best"]["top1_percent"]) == (0, first["top1_percent"])
    [opened] = open_runs([run])
    shown = build_views([opened])[0]  # the report begins with the weights that predict uses
    hits = sum(row.top1 for row in shown.classes)
    assert (shown.step, 100 * hits / first["images"]) == (0, pytest.approx(first["top1_percent"]))
    assert any("did not improve the starting weights" in message for message in messages)


@pytest.mark.parametrize("way", ["other classes", "another classifier", "train_only", "random"])
def test_nothing_is_evaluated_that_cannot_be(
    way: str, trained: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(epochs=1)
    execution = CPU
    weights: Path | None = tmp_path / "w.safetensors"
    logits = recipe.logits + (way == "another classifier")
    values = initial_tensors(recipe.replace(logits=logits))
    classes = [f"other {number}" for number in range(logits)] if way == "other classes" else []
    about = {"recipe": recipe.replace(logits=logits).fields(), "classes": classes}
    checkpoint.write_weights(tmp_path / "w.safetensors", values, about)
    if way == "train_only":
        execution = execution.replace(train_only=True)
    if way == "random":
        weights = None
    lockstep.train(recipe, textures, tmp_path / "run", weights=weights, execution=execution)
    steps = [entry["step"] for entry in read_entries(tmp_path / "run", "evaluate")]
    assert steps == ([] if way == "train_only" else [7])


def test_a_run_that_was_stopped_before_this_evaluation_makes_it_later(
    trained: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=1)

    class Stopped(Exception):
        pass

    def stop(event: Any) -> None:
        if event["kind"] == "progress" and event["what"].startswith("evaluating"):
            raise Stopped

    with pytest.raises(Stopped):
        lockstep.train(recipe, textures, run, weights=trained, execution=CPU, listener=stop)
    assert read_entries(run, "evaluate") == []
    lockstep.train(out=run)
    assert [entry["step"] for entry in read_entries(run, "evaluate")] == [0, 7]
