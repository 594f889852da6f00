"""What all parts share: the ground they measure on, turns, and 95 % intervals."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Say = Callable[[Mapping[str, Any]], None]
"""Writes a row at once, so that it outlives its process."""

T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on."""
NORMAL_95 = 1.960
SPARE_SEC = 8.0
"""A part ends its turns this many seconds before its process would be killed."""


@dataclass(frozen=True)
class Ground:
    """What a part measures on."""

    device: str
    """"cuda" or "cpu"."""
    tiny: bool
    """Whether small models and few steps only show that the part runs."""
    deadline: float
    """`time.monotonic` when the process is killed."""
    out: str
    """The folder for files other than the results."""
    photos: str = ""
    """A folder of JPEGs in folders by class; "": pictures are drawn."""

    @property
    def left_sec(self) -> float:
        """Seconds that are left to measure."""
        return self.deadline - time.monotonic() - SPARE_SEC

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of independent turns, by Student's t. There must be at
    least two.

    >>> interval([9.0, 11.0])
    (-2.706, 22.706)
    """
    assert len(values) > 1
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
    mean = statistics.fmean(values)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return round(mean - half, 6), round(mean + half, 6)


class Contender(Protocol):
    """Something that takes training steps."""

    name: str
    images: int
    """Images of a step."""

    def prepare(self) -> None:
        """Set the process's switches as this contender needs them."""

    def run(self, steps: int) -> None:
        """Take steps. They may still be running on the device when this returns."""


@dataclass(frozen=True)
class Turns:
    """How long contenders are measured."""

    most: int = 5
    fewest: int = 2
    seconds: float = 1.0
    """Length of a turn, about."""


def step_sec(contender: Contender, ground: Ground, steps: int) -> float:
    """Return the seconds of a step, over some steps."""
    ground.wait()
    began = time.perf_counter()
    contender.run(steps)
    ground.wait()
    return (time.perf_counter() - began) / steps


def in_turns(
    contenders: Sequence[Contender], ground: Ground, turns: Turns
) -> dict[str, list[float]]:
    """Return images per second of every contender in every turn, by name.

    Contenders alternate, and each turn begins with another one, so that a drift of clock or heat
    reaches all of them. A step before each turn is not counted. Turns end early when the part's
    time is over, but not before `turns.fewest`.
    """
    steps = {}
    for contender in contenders:
        contender.prepare()
        contender.run(1)
        once = step_sec(contender, ground, 2)
        steps[contender.name] = min(max(round(turns.seconds / once), 2), 200)
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    began = time.monotonic()
    for turn in range(turns.most):
        of_a_turn = (time.monotonic() - began) / turn if turn else 0.0
        if turn >= turns.fewest and ground.left_sec < of_a_turn:
            break
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.prepare()
            contender.run(1)
            rates[contender.name].append(
                contender.images / step_sec(contender, ground, steps[contender.name])
            )
    return rates


def ratio_row(rates: Mapping[str, Sequence[float]], of: str, over: str) -> dict[str, Any]:
    """Return the row of a ratio of two contenders: the geometric mean over turns, and its 95 %
    interval."""
    logs = [math.log(a / b) for a, b in zip(rates[of], rates[over], strict=True)]
    low, high = interval(logs)
    return {
        "what": "ratio",
        "of": of,
        "over": over,
        "ratio": math.exp(statistics.fmean(logs)),
        "interval": [math.exp(low), math.exp(high)],
    }


def median_ms(call: Callable[[], object], ground: Ground, repeats: int, warmup: int = 3) -> float:
    """Return the median milliseconds of a call, until the device is done."""
    for _ in range(warmup):
        call()
    ground.wait()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        ground.wait()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)
