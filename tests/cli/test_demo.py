"""`lockstep demo`."""

import json
from pathlib import Path

import pytest

from tests.processes import call


@pytest.mark.slow
def test_the_demo_reaches_ninety_percent_and_predicts_by_name(tmp_path: Path) -> None:
    code, output, errors = call("demo", "--out", tmp_path / "a demo", seconds=900)
    assert (code, errors) == (0, "")
    report = json.loads((tmp_path / "a demo" / "run" / "report.json").read_text())
    assert report["final"]["trained"]["top1_percent"] >= 90
    assert report["final"]["trained"]["images"] == 400
    named = [line.split() for line in output.splitlines() if line.startswith("  val/")]
    assert len(named) == 10
    assert sum(path.split("/")[1] == name for path, name, *_ in named) >= 7
    assert f"run:    {tmp_path / 'a demo' / 'run'}" in output
    code, output, errors = call("demo", "--out", tmp_path / "a demo")
    assert (code, errors) == (0, "")
    assert "this run was finished" in output
