"""Tables of made-up cells."""

import pytest

from lockstep.cli.benchmark_tables import show_report
from tests.benchmark.cases import entry


def shown(capsys: pytest.CaptureFixture[str], *cells: dict[str, object]) -> str:
    show_report({"cells": list(cells)}, None)
    return "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())


def test_a_row_has_its_times_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(capsys, entry(10.0, data_wait_share=0.257))
    times = " ".join(["400.0"] * 6)
    assert (
        f"torch resnet50-v1.5 fp32 1 4 10.00 9.900 to 10.10 {times} 25.7% computing 50%" in output
    )


def test_a_runtime_has_its_first_answer_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    cell = entry(
        what="inference", runtime="openvino", first_answer_sec=1.234, peak_memory_bytes=250_400_000
    )
    output = shown(capsys, cell, entry(5.0, what="inference"))
    [row] = [
        line
        for line in output.splitlines()
        if line.startswith("openvino resnet50-v1.5 fp32 1 4 10.00 ")
    ]
    assert row.endswith(" 1.23 250")
    assert (
        "inference resnet50-v1.5 fp32 n 1 batch 4: openvino native 10.00 5.000 2.000 apart"
        in output
    )


def test_both_ceilings_stand_behind_what_bounds_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    cell = entry(
        10.0, bound_by="data", compute_only_images_per_sec=30.0, loader_only_images_per_sec=12.5
    )
    assert "data (30.00 | 12.50)" in shown(capsys, cell)


def test_a_share_that_is_not_known_is_not_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(capsys, entry(roofline={"share_of_limit": None}))
    assert "computing -" in output


def test_cells_without_figures_are_said_below(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(
        capsys, entry(), entry(batch=512, status="out of memory", reason="MemoryError: 9 GiB")
    )
    assert (
        "train torch resnet50-v1.5 fp32, n 1, batch 512: out of memory: MemoryError: 9 GiB"
        in output
    )
    assert " 512 " not in output[: output.index("out of memory")].rsplit("\n", 1)[0]


def test_what_holds_for_several_cells_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    reason = {"steady": False, "steady_reason": "too few"}
    output = shown(capsys, *(entry(batch=batch, **reason) for batch in (1, 2, 4)))
    assert output.count("too few") == 1
    assert (
        "3 cells, from train torch resnet50-v1.5 fp32, n 1, batch 1 on: not steady: too few"
        in output
    )


def test_other_programs_are_mentioned_where_they_matter(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(
        capsys, entry(other_programs_share=0.04), entry(batch=8, other_programs_share=0.41)
    )
    assert "batch 8: other programs used 41% of the processors during the measurement" in output
    assert output.count("other programs") == 1


def test_a_row_is_one_line_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    # A blank line, the title, the columns' names, the cell.
    assert len(shown(capsys, entry()).splitlines()) == 4
