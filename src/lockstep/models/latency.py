"""Mean and percentiles of measured times."""

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99, 100)
"""The percentiles of `latency_ms`."""


def latency_ms(times_sec: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds, by "mean", "p50", "p90", "p95", "p99" and "p100"
    (the longest).

    A percentile is the smallest time that at least that percentage of the times do not exceed
    (nearest rank). It is a measured time, never a value between two.

    >>> latencies = latency_ms([0.001, 0.002, 0.003, 0.006])
    >>> latencies["p50"], latencies["mean"]
    (2.0, 3.0)
    """
    ordered = sorted(map(float, times_sec))
    latencies = {"mean": 1000 * (math.fsum(ordered) / len(ordered))}
    for percent in PERCENTILES:
        rank = math.ceil(percent * len(ordered) / 100)
        latencies[f"p{percent}"] = 1000 * ordered[rank - 1]
    return latencies
