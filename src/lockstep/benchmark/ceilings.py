"""The rates a machine reaches: matrix products by the framework that is measured, and copies of memory."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from lockstep import backends
from lockstep.system.machine import share_of_cores

PRODUCT_SIZE = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of the square matrices: large enough that reading them takes no part of the time."""
COPY_BYTES = {"cpu": 2**28, "gpu": 2**30}
"""More than any cache holds."""
SECONDS = 0.5
"""Products and copies are repeated for so long. The fastest counts, since nothing runs faster than a machine can; of several
ranks, whose rates are added up, the median: one rank is fastest when others pause, and each would count so."""


def gemm_gflops(backend: str, dtype: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a large matrix product, in GFLOP/s, on all that this process may use, one of so many that measure.

    Raises whatever the framework does where it has no such product.
    """
    size = PRODUCT_SIZE["gpu" if on_gpu else "cpu"]
    framework = backends.load(backend).products(on_gpu)
    drawn = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    a, b = (framework.tensor(drawn / np.sqrt(size), dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: framework.wait(framework.product(a, b)), ranks) / 1e9


def copy_gb_per_sec(backend: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a copy by one of so many ranks, in 1e9 bytes a second, read and written bytes counted each.

    On a CPU by NumPy in a thread for each core, whatever the framework: few of them copy with more than one.
    """
    if on_gpu:
        size, framework = COPY_BYTES["gpu"], backends.load(backend).products(True)
        values = framework.tensor(np.zeros((1024, size // 4096), np.float32), "fp32")
        return 2 * size / _seconds(lambda: framework.wait(-values), ranks) / 1e9
    size, threads = COPY_BYTES["cpu"], share_of_cores()
    sources, targets = (np.array_split(np.ones(size // 8), threads) for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / _seconds(lambda: list(pool.map(np.copyto, targets, sources)), ranks) / 1e9


def _seconds(work: Callable[[], object], ranks: int) -> float:
    """Return the shortest time of several, in seconds, or of several ranks the median; the first is left out."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) if ranks == 1 else median(times)
