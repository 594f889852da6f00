"""`lockstep benchmark convert`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmark.published_cases import report

Answer = tuple[int, str, str]


@pytest.mark.parametrize(("form", "first"), [("nvidia-benchmark", "{"), ("dlll", "DLLL {")])
def test_a_report_is_converted(
    answer: Callable[..., Answer], form: str, first: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report({})))
    code, output, _ = answer(
        "benchmark", "convert", tmp_path / "report.json", "--form", form, "-o", tmp_path / "out"
    )
    assert (code, output) == (0, "")
    assert (tmp_path / "out").read_text().startswith(first)


def test_special_files_are_written_to(answer: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report({})))
    (tmp_path / "link").symlink_to(tmp_path / "out")
    code, _, _ = answer(
        "benchmark", "convert", tmp_path / "report.json", "--form", "dlll", "-o", tmp_path / "link"
    )
    assert code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out").read_text().startswith("DLLL")


def test_an_unknown_form_is_refused(answer: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report({})))
    code, _, errors = answer(
        "benchmark", "convert", tmp_path / "report.json", "--form", "csv", "-o", tmp_path / "out"
    )
    assert code == 2
    assert "'csv'. Known: nvidia-report, nvidia-benchmark, dlll, timm" in errors
    assert not (tmp_path / "out").exists()
