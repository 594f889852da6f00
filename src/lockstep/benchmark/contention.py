"""Measure how much other programs used the processors during a measurement."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_COUNTED = (0, 1, 2, 5, 6, 7)
"""Fields of /proc/stat that count as busy: user, nice, system, interrupts (two), and other guests
of the host.

Idle and waiting do not count.
"""


@dataclass(frozen=True)
class ProcessorTime:
    """Clocks at one moment: seconds since an arbitrary start."""

    wall_sec: float
    own_sec: float
    """Processor time of this process on all cores."""
    busy_sec: float | None
    """Processor time of all programs on all cores of the machine; None if the system does not
    report it."""

    @classmethod
    def now(cls) -> Self:
        """Return the clocks of this moment."""
        return cls(time.monotonic(), time.process_time(), _read_busy_sec())

    def since(self, earlier: Self) -> "ProcessorTime":
        """Return the time that has passed since `earlier`."""
        busy = None
        if self.busy_sec is not None and earlier.busy_sec is not None:
            busy = self.busy_sec - earlier.busy_sec
        return ProcessorTime(self.wall_sec - earlier.wall_sec, self.own_sec - earlier.own_sec, busy)


def _read_busy_sec() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except (OSError, IndexError):
        return None
    return sum(int(fields[i]) for i in _COUNTED if i < len(fields)) / os.sysconf("SC_CLK_TCK")


def measure_others(passed: list[ProcessorTime], cores: int) -> float | None:
    """Return the share of all cores that other programs than these ranks used. `passed` has the
    times of each rank.

    >>> times = [ProcessorTime(10.0, own_sec=4.0, busy_sec=15.0), ProcessorTime(10.0, 6.0, 15.0)]
    >>> measure_others(times, cores=2)
    0.25
    """
    busy = passed[0].busy_sec
    if busy is None:
        return None
    return max(busy - sum(rank.own_sec for rank in passed), 0.0) / (cores * passed[0].wall_sec)
