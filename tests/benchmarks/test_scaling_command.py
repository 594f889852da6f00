"""`python -m benchmarks.scaling`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.fit import KIND
from tests.benchmark.cases import entry

Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Return a function that runs a command line in this process and returns exit code, output and
    errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code: str | int | None = 0
        try:
            main(list(map(str, arguments)))
        except SystemExit as stop:
            code = stop.code
        return int(code or 0), *capsys.readouterr()

    return run


def words(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_published_speeds_stand_next_to_predicted_ones(answer: Answer) -> None:
    code, output, _ = answer("-n", "8,1024")
    lines = words(output)
    assert code == 0
    assert [line for line in lines if "fp16 208 8 1443 10263 7.11 7." in line]
    assert [line for line in lines if line.startswith("check 3584 16 9940000 9")]
    titles = [line for line in lines if line.startswith("predicted: ")]
    assert len(titles) == 5
    assert {line.split()[1] for line in titles} == {"resnet50", "resnext101-32x4d"}
    rows = [line.split() for line in lines if line.startswith("1024 ")]
    assert len(rows) == 5
    for row in rows:
        assert row[0:2] in (["1024", "256"], ["1024", "128"], ["1024", "400"])
        assert 900 < float(row[3]) < 1024


def test_one_system_with_its_loader(answer: Answer) -> None:
    code, output, _ = answer("--system", "dgx-1", "--loader", "8000", "-n", "64")
    assert code == 0
    (row, _) = [line for line in words(output) if line.startswith("64 ")]
    assert row.startswith("64 256 64000 53.33 loading 32 ")
    assert "MLPerf" not in output


def test_json_has_what_the_tables_show(answer: Answer) -> None:
    code, output, _ = answer("--json", "-n", "8,3", "--global-batch", "1024")
    content = json.loads(output)
    assert code == 0
    assert set(content) == {"published", "mlperf", "predicted"}
    assert content["published"][0]["published_speedup"] == pytest.approx(5391.8 / 1442.6)
    assert [item["ranks"] for item in content["predicted"][0]["weak"]] == [8, 3]
    # 3 does not divide 1,024.
    assert [item["ranks"] for item in content["predicted"][0]["strong"]] == [8]


def campaign(path: Path) -> Path:
    """Write steps of a machine whose ranks share cores: 0.1 s and 0.05 s an image for one rank, no
    time for exchanges."""
    rows: list[dict[str, Any]] = [
        {"ranks": ranks, "batch": batch, "hosts": 1, "bits_per_sec": None, "fitted": ranks != 3}
        | {"all_reduce_mb": 25, "times_sec": [ranks * (0.1 + 0.05 * batch)] * 3}
        for ranks in (1, 2, 3)
        for batch in (4, 8)
    ]
    rows[-1]["times_sec"] = [1.25]  # the model says 1.5 s
    path.write_text(
        json.dumps({"kind": KIND, "version": 1, "settings": {"model": "resnet50"}, "rows": rows})
    )
    return path


def test_measured_steps_are_fitted_and_checked(answer: Answer, tmp_path: Path) -> None:
    code, output, _ = answer("--measured", campaign(tmp_path / "steps.json"))
    lines = words(output)
    assert code == 0
    assert "fixed time of a step of one rank 100.0 ms" in lines
    assert "time of an image 50.00 ms" in lines
    assert (
        "fitted 2 1 8 25 1.0000 1.0000 +0.0%" in lines
        or "fitted 2 1 8 25 1.0000 1.0000 -0.0%" in lines
    )
    assert "check 3 1 8 25 1.2500 1.5000 +20.0%" in lines
    assert "the largest difference of a check is 20.0%" in lines
    assert "predicted: " not in output


def test_reports_of_gpus_are_extended_to_more_gpus(answer: Answer, tmp_path: Path) -> None:
    cells = [
        entry(batch=batch, times_sec=[0.01 + 0.001 * batch] * 3, device="NVIDIA A100-SXM4-80GB")
        for batch in (64, 128)
    ]
    content = {
        "kind": "lockstep-benchmark",
        "version": 1,
        "settings": {"execution": {}},
        "environment": {},
        "cells": cells,
    }
    (tmp_path / "report.json").write_text(json.dumps(content))
    arguments = (
        "--measured",
        tmp_path / "report.json",
        "--system",
        "dgx-a100",
        "-n",
        "1,64",
        "--global-batch",
        "4096",
    )
    code, output, _ = answer(*arguments)
    lines = words(output)
    assert code == 0
    assert [
        line
        for line in lines
        if line.startswith(
            "predicted: resnet50 on dgx-a100, from 928 images/s of one GPU (measured)"
        )
    ]
    # Four exchanges of 17 to 30 MB: the last one takes 0.4 ms of 138 ms.
    (row,) = [line.split() for line in lines if line.startswith("64 ")]
    assert (row[1], row[4], row[5]) == ("128", "images", "64")
    assert 63.5 < float(row[3]) < 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--system", "dgx"), "there is no system 'dgx'"),
        (("-n", "0"), "-n is 0, expected numbers of GPUs from 1 to 1,000,000"),
        (("-n", "8,1000001"), "expected numbers of GPUs from 1 to 1,000,000"),
        (("--loader", "-1"), "--loader is -1.0, expected images per second"),
        (("--global-batch", "0"), "--global-batch is 0, expected at least 1 image"),
        (("--loader", "inf"), "--loader is inf, expected images per second"),
        (("-n", "x"), "-n is 'x', expected comma-separated numbers"),
        (("--measured", "none.json"), "none.json cannot be read"),
    ],
)
def test_wrong_use_is_explained(answer: Answer, arguments: tuple[str, ...], message: str) -> None:
    code, _, errors = answer(*arguments)
    assert code == 2
    assert message in errors
