"""A profile of some steps by Python's own profiler."""

import cProfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `trace.pstats` into a folder, for `python -m pstats` or SnakeViz: the time of every
    function."""
    trace = cProfile.Profile()
    trace.enable()
    try:
        yield
    finally:
        trace.disable()
        trace.dump_stats(folder / "trace.pstats")
