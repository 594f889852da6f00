"""Compute the figures of a cell's report from what its ranks measured. All functions are pure."""

import math
from typing import Any

from lockstep.benchmark import iteration_times
from lockstep.benchmark.cells import SYNTHETIC, TRAIN, Cell, Plan
from lockstep.benchmark.contention import ProcessorTime, measure_others
from lockstep.models.latency import latency_ms
from lockstep.models.operations import Work, limit_images_per_sec, work
from lockstep.recipes import Recipe

COMPUTING = "computing"
DATA = "data"
NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "times_sec",
        "images_per_sec",
        "interval",
        "latency_ms",
        "data_wait_share",
        "compute_only_images_per_sec",
        "loader_only_images_per_sec",
        "bound_by",
        "steady",
        "steady_reason",
        "roofline",
        "other_definitions",
        "other_programs_share",
        "first_answer_sec",
        "peak_memory_bytes",
        "device",
    )
)
"""The figures of a cell that was not measured."""


def combine_times(timelines: list[dict[str, Any]]) -> list[float]:
    """Return how long each iteration took on all ranks together, in seconds: until it has ended on
    every rank.

    The times add up to the time from the first rank's start to the last rank's end.
    """
    start = min(timeline["began"] for timeline in timelines)
    times = []
    for ends in zip(*(timeline["ends"] for timeline in timelines), strict=True):
        times.append(max(ends) - start)
        start = max(ends)
    return times


def compute_figures(
    cell: Cell, plan: Plan, recipe: Recipe, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a cell's figures from the `lockstep.benchmark.measurement.Measured` of its ranks, as
    plain values."""
    counted = [rank["counted"] for rank in ranks]
    times = combine_times(counted)
    images = cell.batch * cell.ranks
    rate = iteration_times.images_per_sec(times, images)
    latency = latency_ms(times)
    iteration_times.check(times, images, rate, latency)
    steadiness = iteration_times.judge_steadiness(times)
    waited = math.fsum(math.fsum(timeline["waited_sec"]) for timeline in counted) / len(counted)
    computing = _measure_rate(ranks, "compute_only", images)
    loading = _measure_rate(ranks, "loader_only", images)
    bound_by = COMPUTING
    if loading is not None and computing is not None and computing > loading:
        bound_by = DATA
    warmup = combine_times([rank["warmup"] for rank in ranks])
    processors = [ProcessorTime(**rank["processors"]) for rank in ranks]
    return {
        "times_sec": times,
        "images_per_sec": rate,
        "interval": list(iteration_times.interval(times, images)),
        "latency_ms": latency,
        "data_wait_share": waited / math.fsum(times),
        "compute_only_images_per_sec": rate if cell.data == SYNTHETIC else computing,
        "loader_only_images_per_sec": loading,
        "bound_by": bound_by,
        "steady": steadiness.steady,
        "steady_reason": steadiness.reason,
        "roofline": _compare_with_limit(cell, recipe, ranks, rate),
        "other_definitions": iteration_times.other_definitions(times, warmup, images, plan.epochs),
        "other_programs_share": measure_others(processors, ranks[0]["machine_cores"]),
        "first_answer_sec": None if cell.what == TRAIN else max(map(_time_first_answer, ranks)),
        "peak_memory_bytes": _add_up(ranks, "peak_memory_bytes"),
        "device": ranks[0]["device"],
    }


def _time_first_answer(rank: dict[str, Any]) -> float:
    """Return the seconds from the start of a rank's process to the end of its first batch."""
    ends: list[float] = rank["warmup"]["ends"] + rank["counted"]["ends"]
    return ends[0] - float(rank["started"])


def _measure_rate(ranks: list[dict[str, Any]], name: str, images: int) -> float | None:
    timelines = [rank[name] for rank in ranks if rank[name] is not None]
    if not timelines:
        return None
    return iteration_times.images_per_sec(combine_times(timelines), images)


def _compare_with_limit(
    cell: Cell, recipe: Recipe, ranks: list[dict[str, Any]], rate: float
) -> dict[str, Any]:
    """Return operations and bytes of an image, the rates of all ranks' devices, the limit they set,
    and the share reached.

    A rate is None if a rank could not measure it. Then the limit and the share are None too.
    """
    image = image_work(cell, recipe)
    gemm = _add_up(ranks, "gemm_gflops")
    copy = _add_up(ranks, "copy_gb_per_sec")
    limit = None if gemm is None or copy is None else limit_images_per_sec(image, gemm, copy)
    return {
        "gflop_per_image": image.flops / 1e9,
        "bytes_per_image": image.bytes,
        "gemm_gflops": gemm,
        "copy_gb_per_sec": copy,
        "limit_images_per_sec": limit,
        "share_of_limit": None if limit is None else rate / limit,
    }


def _add_up(ranks: list[dict[str, Any]], name: str) -> float | None:
    values = [rank[name] for rank in ranks]
    return None if None in values else math.fsum(values)


def image_work(cell: Cell, recipe: Recipe) -> Work:
    """Return the least work that one image of a cell costs."""
    training = cell.what == TRAIN
    size = recipe.image_size if training else recipe.eval_crop
    return work(
        recipe.spec,
        size,
        recipe.logits,
        precision=cell.dtype,
        batch=cell.batch,
        training=training,
    )
