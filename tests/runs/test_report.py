"""What the report that `lockstep.train` returns says of the best checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.runs.report import Report, add_best_checkpoint


def report_run(out: Path, *entries: dict[str, Any], saved: tuple[int, ...] = (20, 30)) -> Report:
    """Return the report of a run with these evaluations and checkpoints."""
    for step in saved:
        (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    lines = []
    for entry in entries:
        figures = {"kind": "evaluate", "weights": "trained", "loss": 1.0, "top5_percent": 100.0}
        lines.append(json.dumps(figures | {"images_per_sec": 1.0} | entry) + "\n")
    (out / "log.jsonl").write_text("".join(lines))
    return add_best_checkpoint(cast(Report, {"steps": 30, "final": {}}), out)


def test_the_best_checkpoint_has_its_path_and_a_published_interval(tmp_path: Path) -> None:
    """81 hits of 263 and their interval are the example of Newcombe (1998)."""
    best = {"step": 20, "top1_percent": 100 * 81 / 263, "images": 263}
    report = report_run(tmp_path, best)
    assert report["best_checkpoint"] == str(tmp_path / "checkpoints" / "step-00000020")
    assert report["top1_percent"] == pytest.approx(30.798, abs=1e-3)
    assert report["top1_interval_percent"] == pytest.approx([25.53, 36.62], abs=0.01)


def test_the_path_of_a_best_moving_average_is_its_file(tmp_path: Path) -> None:
    best = {"step": 20, "top1_percent": 50.0, "images": 8, "weights": "ema"}
    path = Path(report_run(tmp_path, best)["best_checkpoint"])
    assert path == tmp_path / "checkpoints" / "step-00000020" / "ema.safetensors"


def test_without_an_evaluation_the_last_checkpoint_counts(tmp_path: Path) -> None:
    report = report_run(tmp_path)
    assert report["best_checkpoint"] == str(tmp_path / "checkpoints" / "step-00000030")
    assert report["top1_percent"] is report["top1_interval_percent"] is None


def test_the_accuracy_is_that_of_a_checkpoint_which_is_there(tmp_path: Path) -> None:
    evaluations = [
        {"step": 20, "top1_percent": 75.0, "images": 8},
        {"step": 30, "top1_percent": 50.0, "images": 8},
    ]
    report_run(tmp_path, *evaluations)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    report = report_run(tmp_path, *evaluations, saved=())
    assert report["best_checkpoint"].endswith("step-00000030")
    assert report["top1_percent"] == 50.0
