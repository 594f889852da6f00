"""What the report that `lockstep.train` returns says of the best checkpoint."""

from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.runs.report import Report, add_best_checkpoint


def make_report(best: dict[str, Any] | None) -> Report:
    return cast(Report, {"best": best, "steps": 30, "final": {}})


def test_the_best_checkpoint_has_its_path_and_a_published_interval(tmp_path: Path) -> None:
    """81 hits of 263 and their interval are the example of Newcombe (1998)."""
    best = {"step": 20, "top1_percent": 100 * 81 / 263, "images": 263}
    report = add_best_checkpoint(make_report(best), tmp_path)
    assert report["best_checkpoint"] == str(tmp_path / "checkpoints" / "step-00000020")
    assert report["top1_percent"] == pytest.approx(30.798, abs=1e-3)
    assert report["top1_interval_percent"] == pytest.approx([25.53, 36.62], abs=0.01)


def test_the_path_of_a_best_moving_average_is_its_file(tmp_path: Path) -> None:
    best = {"step": 20, "top1_percent": 50.0, "images": 8, "weights": "ema"}
    path = Path(add_best_checkpoint(make_report(best), tmp_path)["best_checkpoint"])
    assert path == tmp_path / "checkpoints" / "step-00000020" / "ema.safetensors"


def test_without_an_evaluation_the_last_checkpoint_counts(tmp_path: Path) -> None:
    report = add_best_checkpoint(make_report(None), tmp_path)
    assert report["best_checkpoint"] == str(tmp_path / "checkpoints" / "step-00000030")
    assert report["top1_percent"] is report["top1_interval_percent"] is None
