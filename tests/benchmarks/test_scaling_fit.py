"""The fit: known parameters are found again in made-up steps, and files of measured steps are read
or refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scaling.fit import KIND, Measured, compare_steps, fit_steps, read_measured
from benchmarks.scaling.model import Cluster, Link, split_gradients
from lockstep.models.architectures import MODELS
from lockstep.system.errors import DataError
from tests.benchmark.cases import entry

FIXED = 0.08
IMAGE = 0.04
SHARING = 0.93
BANDWIDTH = 3e9
LATENCY = 150e-6
EFFICIENCY = 0.94
OVERLAP = 0.6
"""Parameters of the made-up steps."""
MEGABYTES = 102.228128
"""10^6 bytes of ResNet-50's gradients in float32: 25,557,032 values."""
EXCHANGES = {
    1: len(split_gradients(MODELS["resnet50"], 1000, 1)),
    25: len(split_gradients(MODELS["resnet50"], 1000, 25)),
}


def make_row(
    ranks: int, batch: int, hosts: int = 1, megabits: float | None = None, mb: int = 25, **more: Any
) -> Measured:
    """Return a step that takes as long as the parameters above say, by formulas of its own."""
    seconds = FIXED + IMAGE * batch
    if ranks > 1:
        seconds *= SHARING * ranks
        exposed = 2 * (ranks - 1) * (MEGABYTES * 1e6 / BANDWIDTH + ranks * EXCHANGES[mb] * LATENCY)
        if megabits is not None:
            wire = 2 * (ranks - 1) / ranks * MEGABYTES * 8 / (megabits * EFFICIENCY)
            exposed = max(exposed, wire - OVERLAP * 2 / 3 * seconds)
        seconds += exposed
    rate = None if megabits is None else megabits * 1e6
    return Measured(ranks, batch, seconds, 0.02, hosts, rate, mb, **more)


ROWS = [
    *(make_row(ranks, batch) for ranks in (1, 2, 4) for batch in (4, 8)),
    make_row(2, 4, mb=1),
    *(make_row(ranks, 8, 2, megabits) for ranks in (2, 4) for megabits in (100, 1000)),
]


def test_known_parameters_are_found_again() -> None:
    fit = fit_steps(ROWS)
    parameters = (
        fit.fixed_sec,
        fit.image_sec,
        fit.sharing,
        fit.handling.bytes_per_sec,
        fit.handling.latency_sec,
    )
    assert parameters == pytest.approx((FIXED, IMAGE, SHARING, BANDWIDTH, LATENCY))
    assert (fit.efficiency, fit.overlap, fit.variation) == pytest.approx(
        (EFFICIENCY, OVERLAP, 0.02)
    )


def test_steps_that_were_not_fitted_are_predicted() -> None:
    others = [make_row(3, 6), make_row(4, 6, 4, 300), make_row(3, 4, 3, 500)]
    result = [row.difference for row in compare_steps(fit_steps(ROWS), others)]
    assert result == pytest.approx([0.0] * 3, abs=1e-6)
    slower = dataclasses.replace(others[0], step_sec=others[0].step_sec * 1.25)
    assert compare_steps(fit_steps(ROWS), [slower])[0].difference == pytest.approx(-0.2)


def test_checks_do_not_move_the_fit() -> None:
    wrong = dataclasses.replace(make_row(4, 6, 4, 300, fitted=False), step_sec=99.0)
    assert fit_steps([*ROWS, wrong]) == fit_steps(ROWS)


def test_a_link_that_the_work_of_the_cores_hides_says_nothing() -> None:
    # 100 Gbit/s: the wire takes no time, so these rows would pull the overlap up.
    hidden = [make_row(2, 8, 2, 100_000), make_row(4, 8, 2, 100_000)]
    fit = fit_steps([*ROWS, *hidden])
    assert (fit.efficiency, fit.overlap) == pytest.approx((EFFICIENCY, OVERLAP))


def test_noise_of_one_percent_moves_predictions_little() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.01, len(ROWS))
    noisy = [
        dataclasses.replace(row, step_sec=row.step_sec * factor)
        for row, factor in zip(ROWS, noise, strict=True)
    ]
    others = [make_row(3, 6), make_row(4, 6, 4, 300), make_row(2, 6, 2, 300)]
    assert max(abs(row.difference) for row in compare_steps(fit_steps(noisy), others)) < 0.05


def test_no_parameter_is_negative() -> None:
    # Two ranks that are faster than the sum of their computing: bytes and messages cannot take less
    # than nothing.
    rows = [make_row(1, 4), make_row(1, 8), dataclasses.replace(make_row(2, 4), step_sec=0.2)]
    fit = fit_steps(rows)
    assert fit.sharing == pytest.approx(0.2 / (2 * (FIXED + IMAGE * 4)))
    assert fit.handling == Link(float("inf"), 0.0)


def test_a_parameter_that_would_be_negative_is_left_out() -> None:
    # Per rank 0.24 and 0.4 s alone; 0.4 and 0.8 s for two: 1.25 times each, less 0.2 s. Least
    # squares of shares without the 0.2 s: 0.48 s and 0.8 s times the factor are 0.4 and 0.8 s.
    rows = [make_row(1, 4), make_row(1, 8)]
    rows += [
        dataclasses.replace(make_row(2, batch), step_sec=seconds)
        for batch, seconds in ((4, 0.4), (8, 0.8))
    ]
    fit = fit_steps(rows)
    assert fit.handling == Link(float("inf"), 0.0)
    assert fit.sharing == pytest.approx((1.2 + 1.0) / (1.2**2 + 1.0**2))


def test_a_fit_makes_shares_small_and_not_seconds() -> None:
    rows = [
        dataclasses.replace(make_row(1, batch), step_sec=seconds)
        for batch, seconds in ((1, 1.0), (2, 1.4), (100, 30.0))
    ]

    def error(fixed: float, image: float) -> float:
        return sum(((fixed + image * row.batch) / row.step_sec - 1) ** 2 for row in rows)

    fit = fit_steps(rows)
    best = error(fit.fixed_sec, fit.image_sec)
    for factor in (0.99, 1.01):
        assert error(fit.fixed_sec * factor, fit.image_sec) > best
        assert error(fit.fixed_sec, fit.image_sec * factor) > best


def test_one_rank_at_one_batch_is_refused() -> None:
    message = r"fewer than two batches.*measure two: lockstep benchmark train -n 1 -b 4,8"
    with pytest.raises(DataError, match=message):
        fit_steps([make_row(1, 4), make_row(1, 4), make_row(2, 8)])


def test_links_without_a_host_are_refused() -> None:
    with pytest.raises(DataError, match="none of several ranks on one host"):
        fit_steps([make_row(1, 4), make_row(1, 8), make_row(2, 4, 2, 100)])


# Files


def steps_file(**changes: Any) -> dict[str, Any]:
    row = {
        "ranks": 2,
        "batch": 4,
        "hosts": 2,
        "bits_per_sec": 1e8,
        "all_reduce_mb": 25,
        "fitted": False,
    }
    row |= {"times_sec": [1.0, 3.0, 2.0]} | changes
    return {"kind": KIND, "version": 1, "settings": {"model": "resnet50"}, "rows": [row]}


def written(folder: Path, content: Any) -> Path:
    path = folder / "steps.json"
    path.write_text(json.dumps(content))
    return path


def test_a_campaigns_file_is_read(tmp_path: Path) -> None:
    (row,) = read_measured(written(tmp_path, steps_file()))
    assert row == Measured(
        2, 4, 2.0, pytest.approx((2 / 3) ** 0.5 / 2), 2, 1e8, 25, "resnet50", fitted=False
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"times_sec": []},
        {"times_sec": [0.0]},
        {"times_sec": ["1"]},
        {"times_sec": 1.0},
        {"ranks": 0},
        {"ranks": 1.5},
        {"batch": None},
        {"bits_per_sec": None},
        {"bits_per_sec": -1},
        {"fitted": "yes"},
    ],
)
def test_a_wrong_row_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"steps\.json has a row that is incomplete or wrong"):
        read_measured(written(tmp_path, steps_file(**changes)))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as JSON"):
        read_measured(tmp_path / "none.json")
    with pytest.raises(DataError, match="has version 2, expected 1"):
        read_measured(written(tmp_path, steps_file() | {"version": 2}))
    with pytest.raises(DataError, match="not a report of `lockstep benchmark`"):
        read_measured(written(tmp_path, {"kind": "another"}))
    with pytest.raises(DataError, match="incomplete or wrong"):
        read_measured(written(tmp_path, {"kind": KIND, "version": 1}))


def report(*cells: dict[str, Any]) -> dict[str, Any]:
    settings = {"execution": {"all_reduce_mb": 5}}
    return {
        "kind": "lockstep-benchmark",
        "version": 1,
        "settings": settings,
        "environment": {},
        "cells": list(cells),
    }


def test_training_steps_of_a_benchmark_report_are_read(tmp_path: Path) -> None:
    times = {"times_sec": [1.0, 1.2, 1.1]}
    cells = [
        entry(**times, device="CPU, 2 threads"),
        entry(**times, ranks=2, batch=8, device="NVIDIA H100"),
        entry(**times, what="inference"),
        entry(**times, data="images"),
        entry(status="failed", times_sec=None),
    ]
    one, two = read_measured(written(tmp_path, report(*cells)))
    assert (one.ranks, one.batch, one.step_sec, one.all_reduce_mb, one.model, one.on_gpu) == (
        1,
        4,
        1.1,
        5,
        "resnet50",
        False,
    )
    assert (two.ranks, two.batch, two.hosts, two.on_gpu) == (2, 8, 1, True)


def test_ranks_with_a_gpu_each_are_predicted_from_one_and_from_the_system(tmp_path: Path) -> None:
    def make_gpu_row(ranks: int, batch: int) -> Measured:
        return dataclasses.replace(make_row(1, batch), ranks=ranks, on_gpu=True)

    rows = [make_gpu_row(1, 4), make_gpu_row(1, 8), make_gpu_row(4, 8)]
    fit = fit_steps(rows)
    assert fit.sharing is None
    system = Cluster(8, Link(1e18), Link(1e18))
    # Four GPUs take as long as one, and wait for the slowest of four: 1.02938 standard deviations.
    assert compare_steps(fit, rows, system)[2].difference == pytest.approx(0.02 * 1.02938, abs=1e-6)
