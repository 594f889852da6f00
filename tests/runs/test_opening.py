"""What a run is refused for before it trains, what is noted, and a run without a recipe."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.backends.protocol import HostQuestions
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import CheckpointError, DataError, Interrupted, RecipeError
from lockstep.system.machine import Arithmetic
from tests.runs.cases import Event, read_notes, stop_at, train_until


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_images_are_indexed_stops_at_once(
    number: signal.Signals, code: int, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    draw_data_set(tmp_path / "data", train_images=20, val_images=10)
    listener = stop_at("progress", number=number)
    with pytest.raises(Interrupted, match="while indexing train") as stopped:
        lockstep.train(tiny_recipe, tmp_path / "data", tmp_path / "run", listener=listener)
    assert stopped.value.exit_code == code
    assert not (tmp_path / "run").exists()


def test_uneven_parts_leave_no_folder(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    execution = Execution(accumulation_steps=3)
    with pytest.raises(RecipeError, match=r"global_batch_images \(8\) .* multiple of .* \(3\)"):
        lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=execution)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_images_stop_a_resume(split: str, tiny_recipe: Recipe, tmp_path: Path) -> None:
    data = tmp_path / "data"
    draw_data_set(data, train_images=20, val_images=20)
    train_until(stop_at("train"), tiny_recipe, data, tmp_path / "run")
    next((data / split / "dots").glob("*.jpg")).unlink()
    with pytest.raises(CheckpointError, match="images that differ from those in"):
        lockstep.train(tiny_recipe, data, tmp_path / "run")


def test_ranks_with_other_images_do_not_begin(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostQuestions, "same", lambda world, value: False)
    with pytest.raises(DataError, match=f"ranks find different images in {textures}"):
        lockstep.train(tiny_recipe, textures, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": 9}, DataError, "logits=10"),
        ({"global_batch_images": 64}, RecipeError, "only 60 training images"),
    ],
    ids=["more classes than logits", "a step of more images than there are"],
)
def test_a_recipe_that_does_not_fit_the_images_is_refused(
    changes: dict[str, int],
    error: type[Exception],
    message: str,
    textures: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        lockstep.train(tiny_recipe.replace(**changes), textures, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_epochs": 0}, []),
        (
            {"precision": "fp16", "logits": 12},
            ["precision=bf16", "10 classes, but the model has 12", "the warm-up of 1 epoch"],
        ),
    ],
    ids=str,
)
def test_unusual_settings_are_noted(
    changes: dict[str, Any],
    words: list[str],
    textures: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arithmetic = Arithmetic(("AVX-512",), ("fp32", "bf16"), "bf16")
    monkeypatch.setattr("lockstep.system.machine.arithmetic", lambda: arithmetic)
    events: list[Event] = []
    recipe = tiny_recipe.replace(epochs=1, **changes)
    lockstep.train(recipe, textures, tmp_path / "run", listener=events.append)
    notes = read_notes(events)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_own_images_need_no_recipe(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    data = tmp_path / "images"
    run = tmp_path / "run"
    shutil.copytree(textures / "train", data, ignore=shutil.ignore_patterns(".*"))
    events: list[Event] = []
    changes = {
        "model": tiny_recipe.fields()["model"],
        "epochs": 1,
        "precision": "fp32",
        "eval_sampling": "asymmetric",
    }
    report = lockstep.train(data=data, out=run, split=0.25, changes=changes, listener=events.append)
    kinds = [event["kind"] for event in events if event["kind"] != "progress"]
    assert kinds[:2] == ["settled", "start"]
    recipe = lockstep.load_recipe(run)
    assert (recipe.logits, recipe.image_size, recipe.validation_share) == (10, 64, 0.25)
    assert all(
        isinstance(value, int | float | str | bool | list | dict)
        for value in recipe.fields().values()
    )
    images = report["final"]["trained"]["images"]
    assert events[-1]["report"].items() <= report.items()
    assert 10 <= images < 30
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["train"]["images"] + images, environment["data"]) == (60, str(data))
    again = lockstep.train(data=data, out=run)
    assert again["per_class"] == report["per_class"], "the same run, with neither recipe nor split"
    evaluated = lockstep.load(run).evaluate(data).to_json()
    assert evaluated["per_class"] == report["per_class"]["trained"]
    assert evaluated["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-5), (
        "resized as in the run"
    )
    assert lockstep.load(run).evaluate(data, split=0).to_json()["images"] == 60
    assert lockstep.load(run).evaluate(textures).to_json()["images"] == 20
    page = lockstep.report(run, tmp_path / "page.html").read_text()
    assert 'data-image="' in page
    with pytest.raises(RecipeError, match=r"validation_share: 0\.25 in that run, 0\.5 here"):
        lockstep.train(data=data, out=run, split=0.5)
