"""Figures of several ranks' timelines together, computed by hand."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.benchmark.cells import Plan
from lockstep.benchmark.figures import NOTHING, combine_times, compute_figures
from tests.benchmark.cases import CELL, rank, timeline

PLAN = Plan(iterations=2, epochs=1)


def compute(*ranks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    cell = replace(CELL, ranks=len(ranks), **changes)
    return compute_figures(cell, PLAN, PLAN.make_recipe(cell), list(ranks))


def test_an_iteration_ends_when_it_has_ended_on_every_rank() -> None:
    times = combine_times(
        [timeline(11.0, 13.0, 14.0, began=10.0), timeline(12.0, 12.5, 16.0, began=9.5)]
    )
    assert times == [2.5, 1.0, 3.0]
    assert sum(times) == 16.0 - 9.5


def test_images_are_counted_on_all_ranks() -> None:
    alone = compute(rank(timeline(1.0, 2.0)))
    two = compute(rank(timeline(1.0, 2.0)), rank(timeline(1.0, 2.0)))
    assert alone["images_per_sec"] == 4
    assert two["images_per_sec"] == 8
    assert alone["times_sec"] == two["times_sec"] == [1.0, 1.0]


def test_a_cell_without_figures_lacks_exactly_these() -> None:
    assert set(compute(rank(timeline(1.0, 2.0)))) == set(NOTHING)


def test_the_first_answer_ends_the_first_batch_of_a_process_whether_it_is_warm_up_or_not() -> None:
    slow = rank(timeline(9.0, 10.0), started=1.0)
    fast = rank(timeline(9.0, 9.5), warmup=timeline(4.0, 5.0), started=1.0)
    assert compute(slow, what="inference")["first_answer_sec"] == 8.0
    assert compute(fast, what="inference")["first_answer_sec"] == 3.0
    assert compute(slow, slow | {"started": 0.5}, what="inference")["first_answer_sec"] == 8.5
    assert compute(slow)["first_answer_sec"] is None, "a training step answers nothing"


def test_synthetic_data_are_bound_by_computing() -> None:
    result = compute(rank(timeline(1.0, 2.0)))
    assert (result["bound_by"], result["loader_only_images_per_sec"]) == ("computing", None)
    assert result["compute_only_images_per_sec"] == result["images_per_sec"]


@pytest.mark.parametrize(("loading_sec", "bound_by"), [(0.25, "computing"), (1.0, "data")])
def test_the_lower_ceiling_bounds(loading_sec: float, bound_by: str) -> None:
    ceilings = {
        "compute_only": timeline(0.5, 1.0),
        "loader_only": timeline(loading_sec, 2 * loading_sec),
    }
    result = compute(rank(timeline(1.0, 2.0, waited=0.75), **ceilings), data="photos")
    assert result["compute_only_images_per_sec"] == 8
    assert result["loader_only_images_per_sec"] == 4 / loading_sec
    assert result["bound_by"] == bound_by
    assert result["data_wait_share"] == 0.75


def test_warm_up_counts_for_nobody_but_pytorchs_definition() -> None:
    result = compute(rank(timeline(1.0, 2.0), warmup=timeline(100.0, 104.0, began=96.0)))
    assert result["images_per_sec"] == 4
    # Iterations of 4, 4, 1 and 1 s.
    assert result["other_definitions"]["pytorch"] == pytest.approx((1 + 1 + 4 + 4) / 4)


def test_the_share_of_the_limit_is_of_all_ranks() -> None:
    # ResNet-50's training takes 24.3 GFLOP for each image: 100 GFLOP/s allow 4.1 images/s, memory
    # allows 14.
    alone = compute(rank(timeline(1.0, 2.0), copy_gb_per_sec=1000.0))["roofline"]
    assert alone["limit_images_per_sec"] == pytest.approx(100 / (3 * 8.178 - 0.236), rel=1e-3)
    assert alone["share_of_limit"] == pytest.approx(4 / alone["limit_images_per_sec"])
    two = compute(*[rank(timeline(1.0, 2.0), copy_gb_per_sec=1000.0)] * 2)["roofline"]
    assert two["limit_images_per_sec"] == 2 * alone["limit_images_per_sec"]
    assert two["share_of_limit"] == alone["share_of_limit"]


def test_other_programs_have_what_no_rank_has() -> None:
    # On 2 cores in 10 s: 20 s of processor time. Two ranks had 5 and 4, all programs 15.
    times = [{"wall_sec": 10.0, "own_sec": own, "busy_sec": 15.0} for own in (5.0, 4.0)]
    result = compute(*(rank(timeline(1.0, 2.0), processors=time) for time in times))
    assert result["other_programs_share"] == 6 / 20
    untold = {"wall_sec": 10.0, "own_sec": 5.0, "busy_sec": None}
    assert compute(rank(timeline(1.0, 2.0), processors=untold))["other_programs_share"] is None


@pytest.mark.parametrize("name", ["gemm_gflops", "copy_gb_per_sec"])
def test_without_products_or_copies_no_limit_is_claimed(name: str) -> None:
    result = compute(rank(timeline(1.0, 2.0)), rank(timeline(1.0, 2.0), **{name: None}))
    assert result["roofline"][name] is None
    assert result["roofline"]["limit_images_per_sec"] is None
    assert result["roofline"]["share_of_limit"] is None
    assert result["roofline"]["gflop_per_image"] > 24
