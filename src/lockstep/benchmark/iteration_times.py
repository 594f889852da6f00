"""Compute figures from the times of iterations. All functions are pure.
docs/reference/benchmark-figures.md explains the choice of figures.

An iteration is a training step, or a batch of inference. Times are in seconds. They follow each
other without a gap, so they add up to the wall time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.models.latency import PERCENTILES

RESAMPLES = 2000
"""Number of samples that the bootstrap draws."""
SEED = 0
LARGEST_DRIFT = 0.05
"""Times count as steady if their median changes by at most this share from the first third to the
last third."""
FEWEST_TO_TELL = 9
"""Drift is checked from this many iterations on: three in each third."""


def images_per_sec(times_sec: Sequence[float], images: int) -> float:
    """Return images over wall time, for iterations of `images` each.

    >>> images_per_sec([1.0, 3.0], 8)
    4.0
    """
    return images * len(times_sec) / math.fsum(times_sec)


def interval(times_sec: Sequence[float], images: int) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of `images_per_sec`, the same for the same times.

    The method is the circular block bootstrap (Politis and Romano 1992). It draws, with
    replacement, blocks of about sqrt(n) successive times, at most a third of the times; a block can
    wrap around the end. Neighbouring iterations are alike (because of a processor's clock, or
    another program), so drawing single iterations would make the interval too narrow. There must be
    at least two times, because one time does not show how times vary.
    """
    assert len(times_sec) > 1
    times = np.asarray(times_sec, np.float64)
    length = min(math.ceil(math.sqrt(len(times))), max(len(times) // 3, 1))
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([times, times[: length - 1]]))])
    blocks = sums[length:] - sums[:-length]
    count = math.ceil(len(times) / length)
    choice = np.random.default_rng(SEED).integers(0, len(times), (RESAMPLES, count))
    rates = images * length * count / blocks[choice].sum(axis=1)
    low, high = np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Steadiness:
    """Whether a rate belongs to a steady state, and why."""

    steady: bool
    reason: str


def judge_steadiness(times_sec: Sequence[float]) -> Steadiness:
    """Return whether the median times of the first and the last third of the iterations differ by
    at most 5 %.

    Medians are used because single slow iterations are not drift. The percentiles show those.
    """
    count = len(times_sec)
    third = count // 3
    if count < FEWEST_TO_TELL:
        reason = f"too few iterations to tell: {count}; at least {FEWEST_TO_TELL} are needed"
        return Steadiness(False, reason)
    drift = float(np.median(times_sec[-third:]) / np.median(times_sec[:third])) - 1
    reason = (
        f"the median time changed by {drift:+.1%} from the first third to the last; up to"
        f" ±{LARGEST_DRIFT:.0%} is steady"
    )
    return Steadiness(abs(drift) <= LARGEST_DRIFT, reason)


def other_definitions(
    times_sec: Sequence[float], warmup_sec: Sequence[float], images: int, epochs: int
) -> dict[str, float | None]:
    """Return the throughput as NVIDIA's examples compute it, by name; None if a definition leaves
    nothing to measure.

    `times_sec` are `epochs` epochs of equal length, `warmup_sec` the iterations before. The source
    is the examples' code:

    - paddlepaddle: images / mean time of the measured steps.
    - mxnet-18.12: harmonic mean over epochs of images / mean time, the first iteration of each
      epoch left out.
    - mxnet-22.10: images / mean time, the first tenth of the iterations left out, 100 at most.
    - pytorch: arithmetic mean of the iterations' rates, warm-up included.
    - tensorflow: arithmetic mean of the measured iterations' rates.

    An arithmetic mean of rates is never below images over wall time. It is above it if times
    differ.
    """
    times = np.asarray(times_sec, np.float64)
    later = times.reshape(epochs, -1)[:, 1:]
    skipped = min(len(times) // 10, 100)
    everything = np.concatenate([np.asarray(warmup_sec, np.float64), times])
    return {
        "paddlepaddle": float(images / times.mean()),
        "mxnet-18.12": float(images / later.mean(axis=1).mean()) if later.size else None,
        "mxnet-22.10": float(images / times[skipped:].mean()),
        "pytorch": float((images / everything).mean()),
        "tensorflow": float((images / times).mean()),
    }


def check(times_sec: Sequence[float], images: int, rate: float, latency: dict[str, float]) -> None:
    """Assert rules that correct figures of these times always follow. Published tables break each
    of these rules."""
    rising = [latency[f"p{percent}"] for percent in PERCENTILES]
    assert rising == sorted(rising), f"percentiles fall: {rising}"
    total = math.fsum(times_sec)
    assert math.isclose(latency["mean"] / 1000 * len(times_sec), total, rel_tol=1e-9), (
        "mean times count is not the total"
    )
    assert math.isclose(rate * total, images * len(times_sec), rel_tol=1e-9), (
        "rate times total is not the images"
    )


def format_rate(rate: float) -> str:
    """Return a rate with four significant digits; digits before the point are never rounded away.

    >>> [format_rate(rate) for rate in (9.87654, 98.7654, 98765.4, 0.0123456)]
    ['9.877', '98.77', '98765', '0.01235']
    """
    exponent = int(f"{rate:.3e}".partition("e")[2])  # after rounding: 9.9996 is 10.00
    return f"{rate:.{max(3 - exponent, 0)}f}"


def quotient(over: float, under: float) -> float:
    """Return the ratio of two rates as printed, so that a printed speed-up follows from the printed
    speeds.

    >>> quotient(3410.4, 1055.3)  # 3410 over 1055
    3.2322274881516586
    """
    return float(format_rate(over)) / float(format_rate(under))


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two intervals, each (low, high), have a point in common.

    >>> overlap((1.0, 2.0), (2.0, 3.0)), overlap((1.0, 2.0), (2.1, 3.0))
    (True, False)
    """
    return max(a[0], b[0]) <= min(a[1], b[1])
