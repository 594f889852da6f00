"""`lockstep benchmark compare-published`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmark.published_cases import report

Answer = tuple[int, str, str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report({"what": "inference", "batch": 128, "dtype": "bf16"})))
    return path


def test_other_hardware_is_named_not_divided(answer: Callable[..., Answer], file: Path) -> None:
    code, output, _ = answer("benchmark", "compare-published", file, "--all")
    lines = output.splitlines()
    assert code == 0
    assert lines[0] == "resnet50-v1.5, inference, images of 224 pixels (published: 224)"
    assert " ".join(lines[1].split()).startswith(
        "images/s mean ms p50 ms p90 ms p95 ms p99 ms hardware"
    )
    ours = (
        "721.3 500.00 250.00 900.00 950.00 990.00 1 x AMD EPYC 9R14 Lockstep, torch bf16 128 this"
        " report"
    )
    assert " ".join(lines[2].split()) == ours
    rows = [line for line in lines[3:] if "NVIDIA/DeepLearningExamples" in line]
    assert len(rows) > 20
    for line in rows:
        assert " x NVIDIA" in line or " x Tesla" in line or " x Intel" in line
        assert "  NVIDIA/DeepLearningExamples" in line  # the source, and no quotient before it
    assert "(p95 is above p99, which is impossible.)" in output
    assert "8 x NVIDIA H200" in output
    assert "--all" not in output


def test_inference_has_published_latencies(answer: Callable[..., Answer], tmp_path: Path) -> None:
    cell = {"what": "inference", "batch": 1, "dtype": "int8", "runtime": "onnxruntime"}
    (tmp_path / "report.json").write_text(json.dumps(report(cell, gpu="NVIDIA A100-SXM4-40GB")))
    _, output, _ = answer("benchmark", "compare-published", tmp_path / "report.json")
    assert "Lockstep, onnxruntime  int8 " in output
    # NVIDIA's table of Paddle-TRT on an A100: int8 at batch 1.
    [row] = [
        line
        for line in output.splitlines()
        if "A100" in line and " int8 " in line and "Paddle" in line
    ][:1]
    assert row.split()[:6] == ["1430.2", "0.70", "-", "0.70", "0.79", "0.80"]


def test_rows_of_other_hardware_are_counted(answer: Callable[..., Answer], file: Path) -> None:
    code, output, _ = answer("benchmark", "compare-published", file)
    assert code == 0
    assert "NVIDIA/DeepLearningExamples" not in output
    assert output.splitlines()[3].startswith("no published figures for AMD EPYC 9R14; ")
    assert "not shown: " in output


def test_quotients_of_like_hardware(answer: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report({}, gpu="Tesla V100-SXM2-16GB")))
    _, output, _ = answer("benchmark", "compare-published", path)
    assert "  0.50, NVIDIA/DeepLearningExamples MxNet" in output


def test_unpublished_models_are_named(answer: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report({"model": "resnet18"})))
    code, output, _ = answer("benchmark", "compare-published", tmp_path / "report.json")
    assert code == 0
    assert output.endswith("this report\nno published figures for this model\n\n")


def test_another_file_is_refused(answer: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    code, _, errors = answer("benchmark", "compare-published", tmp_path / "report.json")
    assert code == 2
    assert "is not a report of `lockstep benchmark`" in errors
