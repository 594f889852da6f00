"""A benchmark report as a page with its roofline."""

from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.benchmark.page import draw_roofline, render, share_of_machine, write_page
from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.system.errors import DataError
from lockstep.system.files import write_json
from tests.benchmark.cases import entry

WORK = {"share_of_limit": 0.5, "gflop_per_image": 20.0, "bytes_per_image": 5e8}


def make_report(*cells: dict[str, Any], **machine: Any) -> BenchmarkReport:
    whole = {"kind": "lockstep-benchmark", "version": 1, "command": "lockstep benchmark train"}
    speeds = {"gemm_gflops": {"fp32": 400.0, "bf16": 800.0}, "copy_gb_per_sec": 10.0} | machine
    whole |= {"settings": {}, "environment": {}, "machine": speeds, "cells": list(cells)}
    return cast(BenchmarkReport, whole)


@pytest.mark.parametrize(("copies", "share"), [(10.0, 0.5), (2.0, 10 * 0.5 / 2)])
def test_a_share_is_that_of_the_lower_limit(copies: float, share: float) -> None:
    # 400 GFLOP/s compute 20 images a second; 10 GB/s move 20 of them, 2 GB/s four.
    cell = entry(10.0, roofline=WORK)
    assert share_of_machine(make_report(cell, copy_gb_per_sec=copies), cell) == pytest.approx(share)


def test_cells_without_a_roof_are_not_drawn() -> None:
    cells = [
        entry(10.0, roofline=WORK),
        entry(10.0, roofline=WORK, dtype="int8"),
        entry(10.0, roofline=WORK, ranks=2),
        entry(10.0, roofline=WORK, what="inference"),
    ]
    figure = draw_roofline(make_report(*cells))
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == ["torch: 50% of the limit"]
    assert draw_roofline(make_report(*cells[1:])) is None
    without_copies = make_report(cells[0], copy_gb_per_sec=None)
    assert draw_roofline(without_copies) is None
    assert "10.00" in render(without_copies, "")


def test_names_of_a_report_are_text_on_the_page() -> None:
    failed = {"status": "failed", "reason": "<script>alert(1)</script>"}
    page = render(make_report(entry(10.0, roofline=WORK), entry(**failed)), "")
    assert "<script>" not in page
    assert "failed: &lt;script&gt;" in page
    assert "9.900 to 10.10" in page


def test_a_page_and_its_roofline_are_written(tmp_path: Path) -> None:
    write_json(tmp_path / "bench.json", make_report(entry(10.0, roofline=WORK)))
    write_page(tmp_path / "bench.json", tmp_path / "page.html", tmp_path / "plots")
    assert "data:image/svg+xml;base64," in (tmp_path / "page.html").read_text()
    files = {file.name for file in (tmp_path / "plots").iterdir()}
    assert files == {"roofline.png", "roofline.svg"}
    write_json(tmp_path / "other.json", {"kind": "another"})
    with pytest.raises(DataError, match="is not a report of `lockstep benchmark`"):
        write_page(tmp_path / "other.json", tmp_path / "page.html")
