"""Complete runs of a tiny model, with a logger that records its calls instead of W&B."""

import shutil
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.loggers import LOGGERS, Kind
from lockstep.runs.report import read_report
from lockstep.system.errors import UserError
from lockstep.system.event_log import read_log
from tests.backends.conftest import BACKENDS
from tests.runs.cases import Event, read_entries, stop_at, tensorboard_events, train_until
from tests.runs.loggers.conftest import Notebook

EXECUTION = Execution(
    backend="torch" if "torch" in BACKENDS else BACKENDS[0],
    log_every_steps=1,
    loggers=("tensorboard", "wandb"),
)


@pytest.fixture
def notebook(noting: Notebook, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    module = sys.modules["lockstep.runs.loggers.noting"]
    monkeypatch.setitem(sys.modules, "lockstep.runs.loggers.wandb", module)
    monkeypatch.setitem(LOGGERS, "wandb", LOGGERS["noting"])
    return noting


@pytest.fixture
def recipe(tiny_recipe: Recipe) -> Recipe:
    """A run of seven steps."""
    return tiny_recipe.replace(epochs=1)


def test_a_stopped_run_resumes_in_the_same_place_with_every_step_once(
    notebook: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    listener = stop_at("train", 3)
    train_until(listener, recipe, textures, tmp_path / "run", execution=EXECUTION)
    lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    (first, about), (second, _) = notebook.select("open")
    assert (first, second) == (None, "key 0")
    assert about["epochs"] == 1
    assert about["ranks"] == 1
    assert [outcome for (outcome,) in notebook.select("close")] == ["stopped", "finished"]
    losses = []
    evaluations = []
    for values, step in notebook.select("figures"):
        if "train/loss" in values:
            losses.append((step, values["train/loss"]))
        if "val_trained/top1_percent" in values:
            evaluations.append(step)
    entries = read_entries(tmp_path / "run", "train")
    assert losses == [(entry["step"], entry["loss"]) for entry in entries]
    assert [step for step, _ in losses] == list(range(1, 8))
    assert evaluations == [7]


def test_the_worst_mistakes_are_shown_at_the_end(
    notebook: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    report = lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    counts = report["per_class"]["trained"]
    mistakes = min(16, sum(counts["images"]) - sum(counts["top1"]))
    names = [f"mistakes/{number:02d}" for number in range(1, mistakes + 1)]
    assert notebook.select("images") == [[names, 7]]
    tags = []
    for event in tensorboard_events(tmp_path / "run"):
        for value in event.summary.value:
            if value.HasField("image"):
                tags.append(value.tag)
                assert (value.image.height, value.image.width) == (32, 32)
    assert [tag[:11] for tag in tags] == names
    assert all("_predicted_as_" in tag for tag in tags)


def test_images_that_cannot_be_read_any_more_do_not_end_a_finished_run(
    notebook: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(textures, data)
    events: list[Event] = []

    def lose_images(event: Event) -> None:
        events.append(event)
        if event["kind"] == "evaluate":
            shutil.rmtree(data / "val")

    report = lockstep.train(
        recipe, data, tmp_path / "run", execution=EXECUTION, listener=lose_images
    )
    assert read_report(tmp_path / "run") is not None
    assert report["steps"] == 7
    assert events[-1]["kind"] == "finish"
    (warning,) = [event["message"] for event in events if event["kind"] == "warning"]
    assert warning.startswith("cannot show the worst mistakes: ")
    assert notebook.select("images") == []
    assert notebook.select("close") == [["finished"]]


def test_predictions_on_noise_are_not_shown_over_images(
    notebook: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    execution = EXECUTION.replace(loader="synthetic")
    report = lockstep.train(recipe, textures, tmp_path / "run", execution=execution)
    counts = report["per_class"]["trained"]
    assert sum(counts["images"]) > sum(counts["top1"])
    assert notebook.select("images") == []


@pytest.mark.parametrize("call", ["open", "figures", "images", "close"])
def test_a_logger_that_fails_does_not_end_the_training(
    call: str, notebook: Notebook, recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    notebook.fails_at = {call}
    warned: list[str] = []
    report = lockstep.train(
        recipe,
        textures,
        tmp_path / "run",
        execution=EXECUTION,
        listener=lambda event: (
            warned.append(event["message"]) if event["kind"] == "warning" else None
        ),
    )
    assert report["steps"] == 7
    assert warned == ["wandb failed and is off from this step on: OSError: the disk is full"]


def test_a_missing_package_is_an_error_before_the_first_step(
    recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        LOGGERS, "wandb", Kind(("no-such-client",), "pip install it", forgets=False)
    )
    with pytest.raises(UserError, match="no-such-client: pip install it"):
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    assert not (tmp_path / "run").exists()


def test_no_loggers_leave_the_log_alone(recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION.replace(loggers=()))
    assert read_log(tmp_path / "run" / "log.jsonl")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "loggers.json").exists()
