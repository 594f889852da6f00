"""Who else used the processors while something was measured."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_COUNTED = (0, 1, 2, 5, 6, 7)
"""Fields in /proc/stat: user, nice, system, interrupts (two), other guests of the host; neither idle nor waiting."""


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds since some beginning, at one moment."""

    wall_sec: float
    own_sec: float
    """Of this process on all cores."""
    busy_sec: float | None
    """Of all programs on all cores of the machine; None if the system does not tell."""

    @classmethod
    def now(cls) -> Self:
        """Return what the clocks show."""
        return cls(time.monotonic(), time.process_time(), _busy_sec())

    def since(self, earlier: Self) -> "ProcessorTime":
        """Return what has passed."""
        busy = None if self.busy_sec is None or earlier.busy_sec is None else self.busy_sec - earlier.busy_sec
        return ProcessorTime(self.wall_sec - earlier.wall_sec, self.own_sec - earlier.own_sec, busy)


def _busy_sec() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except (OSError, IndexError):
        return None
    return sum(int(fields[i]) for i in _COUNTED if i < len(fields)) / os.sysconf("SC_CLK_TCK")


def share_of_others(passed: list[ProcessorTime], cores: int) -> float | None:
    """Return the share of all cores that went to other programs than these ranks, from what has passed on each.

    >>> share_of_others([ProcessorTime(10.0, own_sec=4.0, busy_sec=15.0), ProcessorTime(10.0, 6.0, 15.0)], cores=2)
    0.25
    """
    busy = passed[0].busy_sec
    if busy is None:
        return None
    return max(busy - sum(rank.own_sec for rank in passed), 0.0) / (cores * passed[0].wall_sec)
