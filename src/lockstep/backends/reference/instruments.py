"""What a benchmark needs from NumPy: threads and matrix products; and a profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import Products
from lockstep.system.machine import cores, first_number


def libraries() -> dict[str, Any]:
    """Return the number of threads of NumPy's products."""
    threads = (
        os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or str(cores())
    )
    return {"threads": first_number(threads)}


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied: in float64, whatever is rounded in between."""
    return Products(lambda array, dtype: array.astype(np.float64), lambda result: None)


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `trace.pstats` into a folder, for `python -m pstats` or SnakeViz: the time of every
    function."""
    import cProfile

    trace = cProfile.Profile()
    trace.enable()
    try:
        yield
    finally:
        trace.disable()
        trace.dump_stats(folder / "trace.pstats")
