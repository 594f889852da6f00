"""Cross-validation: runs of folds, one after the other, and what all of them say."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.folds import FILE, describe_folds, list_runs, summarise_folds, train_folds
from lockstep.runs.report import Report, read_report
from lockstep.runs.resuming import RunSettings, complete_settings
from lockstep.system.errors import Interrupted, RecipeError, UserError
from tests.runs.cases import Event, stop_at

FOLDS = 2


def make_report(top1: float, images: int, step: int) -> Report:
    best = {"top1_percent": top1, "images": images, "step": step, "loss": 1.0}
    return cast(Report, {"best": best})


def test_all_folds_together_have_the_interval_of_all_images() -> None:
    """81 hits of 263 and their interval are the example of Newcombe (1998)."""
    reports = [make_report(30.0, 100, 5), make_report(40.0, 100, 6), make_report(1100 / 63, 63, 7)]
    summary = summarise_folds(reports)
    assert summary["mean"] == pytest.approx((30 + 40 + 1100 / 63) / 3)
    assert summary["top1_percent"] == pytest.approx(100 * 81 / 263)
    assert summary["top1_interval_percent"] == pytest.approx([25.53, 36.62], abs=0.01)
    assert describe_folds(summary) == (
        "3 folds: mean top-1 29.15 %, 17.46 % to 40.00 % in single folds, standard deviation"
        " 11.29 %; top-1 of all 263 images together 30.80 % (25.5 to 36.6, Wilson's 95 % interval)"
    )
    known = describe_folds({**summary, "trained_images": 35})
    assert known.startswith(describe_folds(summary))
    assert "too high because 35 of them" in known


def train(
    out: Path, recipe: Recipe, data: Path, listener: Any, execution: Execution | None = None
) -> Any:
    def complete(folder: Path, fields: dict[str, Any]) -> RunSettings:
        return complete_settings(folder, recipe, data, execution or Execution(), changes=fields)

    return train_folds(out, FOLDS, complete, listener=listener)


def test_folds_resume_without_repeats(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(epochs=1)
    finished: list[str] = []
    stop = stop_at("train")

    def stop_in_second(event: Event) -> None:
        finished.append(event["kind"])
        if "finish" in finished:
            stop(event)

    with pytest.raises(Interrupted) as stopped:
        train(tmp_path / "cv", recipe, textures, stop_in_second)
    assert stopped.value.exit_code == 75
    assert not (tmp_path / "cv" / FILE).exists()
    events: list[Event] = []
    summary = train(tmp_path / "cv", recipe, textures, events.append)
    kinds = [event["kind"] for event in events]
    assert (kinds.count("already_finished"), kinds.count("finish")) == (1, 1)
    assert json.loads((tmp_path / "cv" / FILE).read_text()) == summary
    assert summary["images"] == 60  # every training image once
    folders = [tmp_path / "cv" / f"fold-{number}" for number in (1, 2)]
    reports = [cast(Report, read_report(folder)) for folder in folders]
    assert [report["final"]["trained"]["images"] for report in reports] == [30, 30]
    assert summary == summarise_folds(reports)

    again = lockstep.load(folders[0], checkpoint="newest").evaluate().to_json()
    assert again["per_class"] == reports[0]["per_class"]["trained"]
    # The data set has a val, so that --split 0 would be refused.
    assert [
        text.endswith("30 of 60 images") for text in again["remarks"] if "held out" in text
    ] == [True]
    page = lockstep.report(tmp_path / "cv", tmp_path / "page.html").read_text()
    assert "2 folds: mean top-1" in page


def test_runs_of_a_folder_are_listed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("fold-10", "fold-2", "other"):
        (tmp_path / name).mkdir()
    for name in ("fold-10", "fold-2"):
        (tmp_path / name / "recipe.yaml").touch()
    assert [path.name for path in list_runs(tmp_path)] == ["fold-2", "fold-10"]
    assert list_runs(tmp_path / "fold-2") == [tmp_path / "fold-2"]
    assert list_runs(tmp_path / "other") == []


def test_other_folders_are_refused(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="fold 3 of 2: expected a fold from 1 to folds"):
        tiny_recipe.replace(folds=2, fold=3)
    with pytest.raises(RecipeError, match=r"folds and validation_share .* set only one"):
        tiny_recipe.replace(folds=2, fold=1, validation_share=0.1)
    with pytest.raises(RecipeError, match="--folds needs evaluations"):
        train(tmp_path / "cv", tiny_recipe, textures, print, Execution(train_only=True))
    for name in ("model_prefix", "dlll_file", "nvidia_report_file"):
        with pytest.raises(RecipeError, match=f"would overwrite {name} with every run; unset it"):
            train(tmp_path / "cv", tiny_recipe, textures, print, Execution.of({name: "file"}))
    (tmp_path / "recipe.yaml").write_text(tiny_recipe.format_yaml())
    with pytest.raises(UserError, match="holds a run; give cross-validation a new folder"):
        train(tmp_path, tiny_recipe, textures, print)
