"""Notebooks are stored without outputs, and `make notebooks` writes copies that have them."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.run_notebooks import NOTEBOOKS, run_notebook

CELL = """
import matplotlib.pyplot as plt
print("two", 1 + 1)
plt.plot([1, 2])
plt.show()
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/tutorial").glob("*.*")), ids=lambda path: path.stem
)
def test_a_tutorial_imports_public_names_only(path: Path) -> None:
    assert re.findall(r"(?:from|import) lockstep\.[\w.]+", path.read_text(encoding="utf-8")) == []


def test_a_copy_has_what_a_cell_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": [CELL]}
    path = tmp_path / "lesson.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    folder = tmp_path / "copy"
    folder.mkdir()
    run_notebook(path, folder)
    [copied] = json.loads((folder / "lesson.ipynb").read_text(encoding="utf-8"))["cells"]
    text, picture = copied["outputs"]
    assert text["text"] == ["two 2\n"]
    assert picture["data"]["image/png"].startswith("iVBOR")
    assert (folder / "cell-1-1.png").is_file()
