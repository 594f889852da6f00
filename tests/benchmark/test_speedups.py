"""Cells compared with cells."""

from lockstep.benchmark.speedups import compare_settings, pair_claims, pair_reports
from tests.benchmark.cases import entry


def compare_axes(cells: list[dict[str, object]]) -> list[tuple[str, object, object]]:
    return [(pair.axis, pair.over[pair.axis], pair.under[pair.axis]) for pair in pair_claims(cells)]


def test_the_documents_claims_are_pairs_that_differ_in_one_thing() -> None:
    cells = [
        entry(),
        entry(dtype="bf16"),
        entry(dtype="fp16"),
        entry(model="resnet50-v1"),
        entry(ranks=2),
        entry(dtype="bf16", ranks=2),
        entry(compile="off"),
        entry(compile="on"),
        entry(layout="nchw"),
        entry(layout="nhwc"),
        entry(batch=8, dtype="bf16"),
        entry(what="inference", dtype="bf16"),
        entry(what="inference", dtype="bf16", runtime="openvino"),
    ]
    assert compare_axes(cells) == [
        ("dtype", "bf16", "fp32"),
        ("dtype", "fp16", "fp32"),
        ("dtype", "bf16", "fp32"),  # on two ranks
        ("model", "resnet50-v1.5", "resnet50-v1"),
        ("compile", "on", "off"),
        ("layout", "nhwc", "nchw"),
        ("ranks", 2, 1),
        ("ranks", 2, 1),  # in bf16
        ("runtime", "openvino", "native"),
    ]


def test_cells_without_figures_claim_nothing() -> None:
    assert pair_claims([entry(), entry(dtype="bf16", status="out of memory")]) == []


def test_a_quotient_is_that_of_the_printed_rates_and_scaling_that_of_the_ranks() -> None:
    # A published table prints 2.18, but its own rates, 3410 and 1055, give 3.23.
    (pair,) = pair_claims([entry(1055.2), entry(3410.4, dtype="bf16")])
    assert pair.quotient == 3410 / 1055
    assert pair.scaling is None
    (scaling,) = pair_claims([entry(10.0), entry(35.0, ranks=4)])
    assert scaling.scaling == 3.5 / 4


def test_two_reports_are_held_against_each_other_where_both_have_figures() -> None:
    now = {
        "cells": [
            entry(12.0),
            entry(20.0, batch=8),
            entry(30.0, batch=16),
            entry(batch=32, status="failed"),
        ]
    }
    then = {"cells": [entry(30.0, batch=16), entry(10.0), entry(batch=32), entry(dtype="bf16")]}
    pairs = pair_reports(now, then)
    result = [(pair.over["batch"], pair.quotient, pair.overlap) for pair in pairs]
    assert result == [(4, 1.2, False), (16, 1.0, True)]


def settings(**changes: object) -> dict[str, object]:
    return {
        "recipe": "demo",
        "changes": {},
        "iterations": 9,
        "processor": "a",
        "gpus": [],
        "lockstep": "1",
    } | changes


def test_what_was_measured_and_where_forbids_a_quotient_and_versions_and_lengths_do_not() -> None:
    about = {"processor": "a", "torch": "2.0", "processor_mhz": [1.0]}
    now = {"settings": settings(), "environment": {"torch": about}, "cells": [entry()]}
    newer = {"torch": about | {"torch": "2.1", "processor_mhz": [2.0]}}
    changed = settings(changes={"image_size": 64}, iterations=3, gpus=["H100"], lockstep="2")
    then = {"settings": changed, "environment": newer, "cells": [entry()]}
    assert [
        (difference.name, difference.ours, difference.theirs, difference.divides)
        for difference in compare_settings(now, then)
    ] == [
        ("changes", {}, {"image_size": 64}, False),
        ("iterations", 9, 3, True),
        ("gpus", [], ["H100"], False),
        ("lockstep", "1", "2", True),
        ("torch: torch", "2.0", "2.1", True),
    ]
    assert compare_settings(now, now) == []


def test_an_environment_of_one_report_alone_is_no_difference() -> None:
    now = {"settings": settings(), "environment": {"torch": {"processor": "a"}}, "cells": [entry()]}
    assert compare_settings(now, now | {"environment": {}}) == []
