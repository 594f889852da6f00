"""Figures as files."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.errors import UserError

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


def test_a_folder_that_cannot_be_made_is_an_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write plots"):
        lockstep.report(run, tmp_path / "page.html", plots=tmp_path / "file" / "plots")
