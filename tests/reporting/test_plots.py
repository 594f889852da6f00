"""Figures as files."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.errors import UserError
from lockstep.recipes import Recipe
from tests.reporting.cases import write_run

FIGURES = {
    "loss",
    "accuracy",
    "lr",
    "throughput",
    "wait",
    "confusion-run-trained",
    "confusion-run-ema",
    "reliability-run-trained",
    "reliability-run-ema",
}


@pytest.mark.slow
def test_every_figure_is_written_as_png_and_svg(run: Path, tmp_path: Path) -> None:
    lockstep.report(run, tmp_path / "page.html", plots=tmp_path / "plots")
    files = sorted((tmp_path / "plots").iterdir())
    assert {path.stem for path in files} == FIGURES
    assert len(files) == 2 * len(FIGURES)
    for path in files:
        if path.suffix == ".png":
            assert np.asarray(Image.open(path)).std() > 5  # something is drawn
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_names_are_no_formulas_and_all_runs_are_in_the_legend(recipe: Recipe, tmp_path: Path) -> None:
    classes = [r"$\frac$", r"a \$ b"]
    names = ["_begins so", r"for $a_1 and $\frac$"]
    folders = [write_run(tmp_path / name, recipe=recipe, classes=classes, images=40, seed=i) for i, name in enumerate(names)]
    lockstep.report(folders, tmp_path / "page.html", plots=tmp_path / "plots")
    # An SVG of matplotlib has its texts as comments.
    legend = (tmp_path / "plots" / "loss.svg").read_text(encoding="utf-8")
    assert re.findall("<!-- (.*) -->", legend)[-4:] == [*names, *(f"{name}, validation" for name in names)]
    matrix = (tmp_path / "plots" / f"confusion-{names[1]}-trained.svg").read_text(encoding="utf-8")
    assert {*classes, f"Confusion, {names[1]}"} <= set(re.findall("<!-- (.*) -->", matrix))


def test_a_folder_that_cannot_be_made_is_an_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write plots"):
        lockstep.report(run, tmp_path / "page.html", plots=tmp_path / "file" / "plots")
