"""Published systems: the numbers are those of published rows, and predictions next to them."""

import dataclasses
import itertools
import math

import pytest

from benchmarks.scaling.model import Link, images_per_sec
from benchmarks.scaling.published import (
    BASES,
    SUBMISSIONS,
    SYSTEMS,
    build_base_step,
    build_clusters,
    fit_mlperf,
    predict_mlperf,
    predict_speedups,
)
from lockstep.recipes.published_speeds import Row, read_speeds
from lockstep.system.errors import UserError

TRAINED = [row for row in read_speeds() if row.kind == "train" and row.images_per_sec is not None]


def test_speeds_of_bases_and_submissions_are_published() -> None:
    known = {(row.model, row.accelerators, row.images_per_sec) for row in TRAINED}
    assert {
        ("resnet50", submission.gpus, float(submission.images_per_sec))
        for submission in SUBMISSIONS
    } <= known
    for base in BASES:
        of_one = (base.model, 1, float(base.images_per_sec))
        of_eight = (base.model, 8, base.images_per_sec * 8)
        assert of_one in known or of_eight in known


def test_every_system_has_sources_and_gpus_of_published_rows() -> None:
    accelerators = {row.accelerator for row in TRAINED}
    for system in SYSTEMS.values():
        assert accelerators.issuperset(system.accelerators)
        assert len(system.sources) >= 3


def test_bandwidths_by_hand() -> None:
    # DGX A100: 12 NVLinks of 20 GB/s; 8 adapters of 24 GB/s, as NCCL reaches them.
    cluster = SYSTEMS["dgx-a100"].cluster()
    assert (cluster.local.bytes_per_sec, cluster.network.bytes_per_sec) == (240e9, 192e9)
    assert (cluster.ranks_per_host, cluster.loader_images_per_sec, cluster.sharing) == (
        8,
        math.inf,
        None,
    )


def test_a_system_is_chosen_by_name_and_its_loader_limits_it() -> None:
    (name, cluster), *others = build_clusters("dgx-2", 1000.0).items()
    assert (name, cluster.loader_images_per_sec, others) == ("dgx-2", 1000.0, [])
    assert list(build_clusters()) == list(SYSTEMS)
    with pytest.raises(UserError, match=r"there is no system 'dgx-3'\. Did you mean dgx-"):
        build_clusters("dgx-3")


def make_row(accelerators: int, rate: float, **changes: object) -> Row:
    fields = {
        "document": "d",
        "table": "t",
        "model": "resnet50",
        "kind": "train",
        "precision": "mixed",
        "batch_images": 256,
    }
    return Row(
        **fields
        | {
            "accelerator": "NVIDIA A100-SXM4-80GB",
            "accelerators": accelerators,
            "images_per_sec": rate,
        }
        | changes
    )


def test_a_speedup_is_over_one_gpu_of_the_same_table_precision_and_batch() -> None:
    others = [
        make_row(1, 500.0, precision="tf32"),
        make_row(1, 600.0, batch_images=128),
        make_row(1, 700.0, table="u"),
    ]
    rows = [*others, make_row(1, 2000.0), make_row(8, 14000.0), make_row(8, 9999.0, table="v")]
    unknown = [make_row(gpus, gpus * 100.0, accelerator="Another GPU") for gpus in (1, 8)]
    (scaled,) = predict_speedups([*rows, *unknown], build_clusters())
    assert (scaled.row.images_per_sec, scaled.one.images_per_sec, scaled.published_speedup) == (
        14000.0,
        2000.0,
        7.0,
    )
    assert 7.5 < scaled.predicted_speedup < 8.0


def test_published_speedups_in_full_precision_are_those_of_the_model() -> None:
    """Links limit both precisions alike, so what is missing in mixed precision is not theirs
    (docs/explanation/scaling.md)."""
    predictions = predict_speedups(read_speeds(), build_clusters())
    assert len(predictions) == 64
    off = [abs(row.predicted_speedup / row.published_speedup - 1) for row in predictions]
    full = [row.row.precision in ("fp32", "tf32") for row in predictions]
    assert max(itertools.compress(off, full)) < 0.08
    assert max(off) < 0.22
    assert sum(share < 0.1 for share in off) == 55


def test_the_largest_submission_is_predicted_from_the_two_smaller_ones() -> None:
    step = fit_mlperf()
    assert step.buckets == (2 * 25_557_032,)
    predictions = predict_mlperf()
    result = [rate for _, rate in predictions[:2]]
    assert result == pytest.approx([submission.images_per_sec for submission in SUBMISSIONS[:2]])
    assert predictions[2][1] == pytest.approx(SUBMISSIONS[2].images_per_sec, rel=0.05)


def test_a_base_has_its_published_speed_on_one_gpu() -> None:
    for base in BASES:
        cluster = SYSTEMS[base.system].cluster()
        result = images_per_sec(build_base_step(base), cluster, 1, base.batch)
        assert result == pytest.approx(base.images_per_sec)


def test_without_overlap_the_whole_exchange_is_waited_for() -> None:
    base = BASES[0]
    step = build_base_step(base)
    cluster = SYSTEMS[base.system].cluster()
    late = dataclasses.replace(step, overlap=0.0, buckets=(step.gradient_bytes,))
    slower = 1 - images_per_sec(late, cluster, 8, base.batch) / images_per_sec(
        step, cluster, 8, base.batch
    )
    # 2 * 7/8 * 102 MB / 240 GB/s is 0.75 ms of 104 ms. With overlap, the last of four exchanges
    # remains.
    assert 0.003 < slower < 0.0075
    assert Link(1.0) == Link(1.0, 0.0)
