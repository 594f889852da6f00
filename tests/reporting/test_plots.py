"""Figures as files."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.recipes import Recipe
from lockstep.reporting import plots
from lockstep.reporting.collect import open_runs
from lockstep.reporting.curves import build_charts
from lockstep.system.errors import UserError
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


def test_names_are_no_formulas_and_are_in_the_legend(recipe: Recipe, tmp_path: Path) -> None:
    classes = [r"$\frac$", r"a \$ b"]
    names = ["_begins so", r"for $a_1 and $\frac$"]
    folders = [
        write_run(tmp_path / name, recipe=recipe, classes=classes, images=40, seed=i)
        for i, name in enumerate(names)
    ]
    lockstep.report(folders, tmp_path / "page.html", plots=tmp_path / "plots")
    # Matplotlib writes the texts of an SVG as comments.
    legend = (tmp_path / "plots" / "loss.svg").read_text(encoding="utf-8")
    result = re.findall("<!-- (.*) -->", legend)[-4:]
    assert result == [*names, *(f"{name}, validation" for name in names)]
    matrix = (tmp_path / "plots" / f"confusion-{names[1]}-trained.svg").read_text(encoding="utf-8")
    assert {*classes, f"Confusion, {names[1]}"} <= set(re.findall("<!-- (.*) -->", matrix))


def draw_figure(runs: list[Path], name: str) -> Any:
    opened = open_runs(runs)
    return plots._draw_chart(
        next(chart for chart in build_charts(opened) if chart.name == name), opened
    )


def test_a_share_has_no_axis_below_0_nor_above_100(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"])
    log = (folder / "log.jsonl").read_text()
    for share in (0.0, 1.0):
        (folder / "log.jsonl").write_text(
            re.sub(r'"data_wait_share": [^,]*', f'"data_wait_share": {share}', log)
        )
        low, high = draw_figure([folder], "wait").axes[0].get_ylim()
        assert 0 <= low < high <= 100
        assert low <= 100 * share <= high


def test_only_a_point_without_neighbours_has_a_mark(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=5)
    assert draw_figure([folder], "lr").axes[0].lines[0].get_markevery() == [0]
    losses = draw_figure([folder], "loss").axes[0].lines[0]
    assert (len(losses.get_xdata()), losses.get_markevery()) == (5, [])
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(
        re.sub(r'"losses": \[.*?\]', '"losses": [1, null, 1, null, 1]', log)
    )
    assert draw_figure([folder], "loss").axes[0].lines[0].get_markevery() == [0, 2, 4]


def test_a_folder_that_cannot_be_made_is_an_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write plots"):
        lockstep.report(run, tmp_path / "page.html", plots=tmp_path / "file" / "plots")
