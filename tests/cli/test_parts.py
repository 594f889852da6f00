"""Runs in part and runs without validation, from the command line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.recipes import Recipe
from lockstep.runs.reading import read_run
from tests.cli.cases import read_report

Run = Callable[..., tuple[int, str, str]]


def test_a_run_without_validation_is_trained_in_parts_and_evaluated_later(
    answer: Run, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    run = tmp_path / "a run"
    shutil.copytree(textures / "train", data / "train", ignore=shutil.ignore_patterns(".*"))
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(tiny_recipe.replace(epochs=2, global_batch_images=30).format_yaml())
    arguments = ["train", "--recipe", recipe, "--data", data, "--out", run, "--no-tensorboard"]
    code, output, errors = answer(*arguments, "--train-only", "--stop-after-steps", 3)
    assert (code, errors) == (0, "")
    assert re.search("^60 training images on .*, without evaluation$", output, re.MULTILINE)
    assert "note: this command stops after step 3 of 4; repeat it to resume\n" in output
    assert output.endswith(
        f"stopped after step 3 of 4 as requested; saved in {run}. Repeat the command to resume;"
        f" to train to the end: lockstep train --out '{run}'\n"
    )
    assert str(read_run(run).trouble).startswith("not finished: at step 3 of 4; lockstep evaluate")

    code, output, errors = answer("train", "--out", run)
    assert (code, errors) == (0, "")
    assert "top-1                not evaluated\n" in output
    report = read_report(run)
    assert (report["steps"], report["best"]) == (4, None)
    assert (report["final"], report["per_class"]) == ({}, {})
    output = answer("train", "--out", run)[1]
    assert "this run is finished (step 4)" in output
    page = tmp_path / "page.html"
    assert answer("report", run, "-o", page)[0] == 0
    assert "finished at step 4 of 4 without an evaluation there" in page.read_text()

    shutil.copytree(textures / "val", data / "val", ignore=shutil.ignore_patterns(".*"))
    assert answer("train", "--out", run, "--set", "train_only=false")[0] == 0
    later = read_report(run)
    assert (later["final"]["trained"]["images"], later["best"]["step"]) == (20, 4)
