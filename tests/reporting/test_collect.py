"""Reading the folders of runs."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep.data.images import printable
from lockstep.recipes import Recipe, load_recipe
from lockstep.reporting.collect import open_runs
from lockstep.reporting.page import render
from lockstep.reporting.summary import list_results
from lockstep.reporting.views import build_views
from lockstep.runs.image_results import BEST_FILE, Results, write_results
from lockstep.runs.reading import Run
from lockstep.system.errors import CheckpointError
from tests.data.sets import NOT_UTF8
from tests.reporting.cases import STEPS, random_scores, write_run


def open_run(folder: Path) -> Run:
    [run] = open_runs([folder])
    return run


def test_a_finished_run_has_its_results(run: Path) -> None:
    opened = open_run(run)
    assert (opened.name, opened.backend, opened.step, opened.steps, opened.trouble) == (
        "run",
        "torch",
        STEPS,
        STEPS,
        None,
    )
    assert set(opened.final) == {"trained", "ema"}
    assert opened.results is not None
    assert len(opened.results.scores["ema"].labels) == 400


def test_an_unfinished_run_is_shown_as_far_as_it_went(recipe: Recipe, tmp_path: Path) -> None:
    opened = open_run(
        write_run(tmp_path / NOT_UTF8[1], recipe=recipe, classes=["a", "b"], steps=65)
    )
    start = "not finished: at step 65 of 120"
    folder = shlex.quote(printable(str(opened.folder)))
    assert opened.trouble == f"{start}; lockstep evaluate {folder} shows its accuracy and classes"
    assert opened.trouble.isprintable()
    assert opened.final["trained"]["step"] == 60
    assert opened.results is None
    write_results(opened.folder, Results(40, "", {"trained": random_scores(2, 400, 1)}, ("a", "b")))
    assert open_run(opened.folder).results is None, "of an older evaluation"
    write_results(opened.folder, Results(60, "", {"trained": random_scores(2, 400, 1)}, ("a", "b")))
    evaluated = open_run(opened.folder)
    assert evaluated.trouble == f"{start}; classes and mistakes are those of step 60"
    [result] = list_results([evaluated])
    [view] = build_views([evaluated])
    assert [row.name for row in view.classes] == ["a", "b"]
    recalls = [row.top1 / row.images for row in view.classes]
    assert result.values["balanced_accuracy_percent"] == pytest.approx(50 * sum(recalls))


def test_the_best_evaluation_comes_before_the_newest_one(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"])
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    [older] = [entry for entry in log if entry["kind"] == "evaluate" and entry["step"] == 60]
    older["top1_percent"] = 95.0
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    steps = [result.step for result in list_results([open_run(folder)])]
    assert steps == [60, STEPS], "known from the log alone"
    [only] = build_views([open_run(folder)])
    assert only.step == STEPS
    assert only.note.startswith(f"Classes, confusion and mistakes are those of step {STEPS}")
    scores = {"trained": random_scores(2, 400, 1, accuracy=0.95)}
    write_results(folder, Results(60, "of no images", scores), BEST_FILE)
    run = open_run(folder)
    best, newest = build_views([run])
    assert (best.step, best.is_best, newest.step, newest.is_best) == (60, True, STEPS, False)
    hits = int((scores["trained"].ranks < 1).sum())
    assert sum(row.top1 for row in best.classes) == hits
    assert list_results([run])[0].calibration_error == best.calibration_error
    assert "best: step 60, trained" in render([run])


def test_a_run_that_diverged_says_so(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "part", recipe=recipe, classes=["a", "b"], steps=10)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "diverged", "step": 15, "message": "the loss is nan"}\n')
    assert open_run(folder).trouble == "diverged: the loss is nan"


def test_a_run_that_never_began_is_a_run(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.format_yaml())
    opened = open_run(tmp_path)
    assert (opened.trouble, opened.final, opened.backend) == (
        "not finished: at step 0",
        {},
        "unknown",
    )


def test_a_folder_without_a_recipe_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run's folder.*recipe\.yaml"):
        open_runs([tmp_path])


def test_runs_have_distinct_short_names(recipe: Recipe, tmp_path: Path) -> None:
    folders = [tmp_path / name / "run" for name in ("a", "b")]
    for folder in folders:
        write_run(folder, recipe=recipe, classes=["x", "y"], steps=5)
    assert [run.name for run in open_runs(folders)] == ["a/run", "b/run"]
    with pytest.raises(CheckpointError, match="named twice"):
        open_runs([folders[0], folders[0]])


def test_the_nearest_published_recipe_is_the_one_with_the_fewest_other_fields(run: Path) -> None:
    name, fields = open_run(run).nearest_recipe
    assert name == "demo"
    assert fields == {"epochs": (load_recipe("demo").epochs, 4), "ema_decay": (0.0, 0.99)}


def test_a_run_is_compared_with_the_recipe_it_is_based_on(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "named")
    note = "based_on: resnet50-mxnet-90ep\n"
    (tmp_path / "named" / "recipe.yaml").write_text(note + (run / "recipe.yaml").read_text())
    opened = open_run(tmp_path / "named")
    assert (opened.recipe_name, opened.nearest_recipe[0]) == (
        "resnet50-mxnet-90ep",
        "resnet50-mxnet-90ep",
    )
    (tmp_path / "named" / "recipe.yaml").write_text(
        "based_on: my pets\n" + (run / "recipe.yaml").read_text()
    )
    opened = open_run(tmp_path / "named")
    assert (opened.recipe_name, opened.nearest_recipe[0]) == ("my pets", "demo")
