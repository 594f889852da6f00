"""Figures made from the times of iterations: pure functions. docs/benchmarking.md says why they are these.

An iteration is a training step, or a batch of inference. Times are in seconds, one after the other without a gap, so that
they add up to the wall time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99, 100)
RESAMPLES = 2000
"""Of the bootstrap."""
SEED = 0
LARGEST_DRIFT = 0.05
"""Of the median iteration from the first third of the times to the last, where they count as steady."""
FEWEST_TO_TELL = 9
"""Iterations from which on drift is looked for: three in a third."""


def images_per_sec(times_sec: Sequence[float], images: int) -> float:
    """Return images over wall time, for iterations of `images` each.

    >>> images_per_sec([1.0, 3.0], 8)
    4.0
    """
    return images * len(times_sec) / math.fsum(times_sec)


def latency_ms(times_sec: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds, by "mean", "p50", "p90", "p95", "p99" and "p100" (the longest).

    A percentile is the smallest time that at least so many in a hundred do not exceed (nearest rank): a time that was
    measured, never one between two.

    >>> latency_ms([0.001, 0.002, 0.003, 0.006])["p50"], latency_ms([0.001, 0.002, 0.003, 0.006])["mean"]
    (2.0, 3.0)
    """
    ordered = sorted(map(float, times_sec))
    ranks = {f"p{percent}": math.ceil(percent * len(ordered) / 100) for percent in PERCENTILES}
    mean = math.fsum(ordered) / len(ordered)
    return {"mean": 1000 * mean} | {name: 1000 * ordered[rank - 1] for name, rank in ranks.items()}


def interval(times_sec: Sequence[float], images: int) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of `images_per_sec`, the same for the same times.

    Neighbouring iterations are alike (a processor's clock, another program), so blocks of about sqrt(n) in a row, a third of
    the times at most, are drawn with replacement, around the end (circular block bootstrap, Politis and Romano 1992), and
    not single iterations, which would make the interval too narrow. One time alone says nothing of how they vary: there
    must be two.
    """
    assert len(times_sec) > 1
    times = np.asarray(times_sec, np.float64)
    length = min(math.ceil(math.sqrt(len(times))), max(len(times) // 3, 1))
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([times, times[: length - 1]]))])
    of_blocks = sums[length:] - sums[:-length]
    count = math.ceil(len(times) / length)
    drawn = np.random.default_rng(SEED).integers(0, len(times), (RESAMPLES, count))
    rates = images * length * count / of_blocks[drawn].sum(axis=1)
    low, high = np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Steadiness:
    """Whether a rate belongs to a steady state, and what was seen."""

    steady: bool
    reason: str


def steadiness(times_sec: Sequence[float]) -> Steadiness:
    """Say whether the median time of the first third of the iterations and that of the last differ by at most 5 %.

    Medians: single slow iterations, which the percentiles show, are no drift.
    """
    third = len(times_sec) // 3
    if len(times_sec) < FEWEST_TO_TELL:
        return Steadiness(False, f"{len(times_sec)} iterations are too few to tell; at least {FEWEST_TO_TELL}")
    drift = float(np.median(times_sec[-third:]) / np.median(times_sec[:third])) - 1
    return Steadiness(
        abs(drift) <= LARGEST_DRIFT,
        f"the last third's median iteration took {drift:+.1%} against the first third's; ±{LARGEST_DRIFT:.0%} is steady",
    )


def other_definitions(
    times_sec: Sequence[float], warmup_sec: Sequence[float], images: int, epochs: int
) -> dict[str, float | None]:
    """Return the throughput as the originals compute it, by their names; None where theirs leaves nothing to measure.

    `times_sec` are `epochs` epochs of equal length, `warmup_sec` the iterations before. The sources are their code:

    - paddlepaddle: images / mean time of the measured steps.
    - mxnet-18.12: harmonic mean over epochs of images / mean time, the first iteration of each epoch left out.
    - mxnet-22.10: images / mean time, the first tenth of the iterations left out, 100 at most.
    - pytorch: arithmetic mean of the iterations' rates, warm-up included.
    - tensorflow: arithmetic mean of the measured iterations' rates.

    An arithmetic mean of rates is never below images over wall time, and above it when times differ.
    """
    times = np.asarray(times_sec, np.float64)
    of_epochs = times.reshape(epochs, -1)
    without_first = of_epochs[:, 1:]
    skipped = min(len(times) // 10, 100)
    return {
        "paddlepaddle": float(images / times.mean()),
        "mxnet-18.12": float(images / without_first.mean(axis=1).mean()) if without_first.size else None,
        "mxnet-22.10": float(images / times[skipped:].mean()),
        "pytorch": float((images / np.concatenate([np.asarray(warmup_sec, np.float64), times])).mean()),
        "tensorflow": float((images / times).mean()),
    }


def check(times_sec: Sequence[float], images: int, rate: float, latency: dict[str, float]) -> None:
    """Assert what holds for any figures rightly made of these times: published tables break each of these rules."""
    rising = [latency[f"p{percent}"] for percent in PERCENTILES]
    assert rising == sorted(rising), f"percentiles fall: {rising}"
    total = math.fsum(times_sec)
    assert math.isclose(latency["mean"] / 1000 * len(times_sec), total, rel_tol=1e-9), "mean times count is not the total"
    assert math.isclose(rate * total, images * len(times_sec), rel_tol=1e-9), "rate times total is not the images"


def printed(rate: float) -> str:
    """Return a rate with four digits that count.

    >>> printed(9.87654), printed(98.7654), printed(98765.4), printed(0.0123456)
    ('9.877', '98.77', '98765', '0.01235')
    """
    exponent = int(f"{rate:.3e}".partition("e")[2])  # after it was rounded: 9.9996 is 10.00
    return f"{rate:.{max(3 - exponent, 0)}f}"


def quotient(over: float, under: float) -> float:
    """Return the quotient of two rates as they are printed, so that a printed speed-up follows from the printed speeds.

    >>> quotient(3410.4, 1055.3)  # 3410 over 1055
    3.2322274881516586
    """
    return float(printed(over)) / float(printed(under))


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two intervals, each its low and its high end, have a point in common.

    >>> overlap((1.0, 2.0), (2.0, 3.0)), overlap((1.0, 2.0), (2.1, 3.0))
    (True, False)
    """
    return max(a[0], b[0]) <= min(a[1], b[1])
