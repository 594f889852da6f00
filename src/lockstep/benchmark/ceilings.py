"""Measure the rates that a machine reaches: matrix products with the measured framework, and memory
copies."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from lockstep import backends
from lockstep.system.machine import share_of_cores

PRODUCT_SIZE = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of the square matrices: large enough that the time to read them does not
matter."""
COPY_BYTES = {"cpu": 2**28, "gpu": 2**30}
"""Bytes that a copy reads: more than any cache holds."""
SECONDS = 0.5
"""Products and copies are repeated for this many seconds. With one rank the fastest one counts:
nothing runs faster than the machine can. With several ranks the median counts: their rates are
added up, and each rank is fastest while others pause."""


def gemm_gflops(backend: str, dtype: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a large matrix product in GFLOP/s, with all that this process may use.

    `ranks` processes measure at the same time. Raises whatever the framework raises if it has no
    such product.
    """
    size = PRODUCT_SIZE["gpu" if on_gpu else "cpu"]
    framework = backends.load(backend).products(on_gpu)
    values = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32) / np.sqrt(size)
    a = framework.tensor(values, dtype)
    b = framework.tensor(values, dtype)
    return 2 * size**3 / _time(lambda: framework.wait(framework.product(a, b)), ranks) / 1e9


def copy_gb_per_sec(backend: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a memory copy by one of `ranks` ranks, in 1e9 bytes per second. Bytes read
    and written both count.

    On a CPU, NumPy copies with one thread for each core, for every framework: few frameworks copy
    with more than one thread.
    """
    if on_gpu:
        size = COPY_BYTES["gpu"]
        framework = backends.load(backend).products(True)
        values = framework.tensor(np.zeros((1024, size // 4096), np.float32), "fp32")
        return 2 * size / _time(lambda: framework.wait(-values), ranks) / 1e9
    size = COPY_BYTES["cpu"]
    threads = share_of_cores()
    sources = np.array_split(np.ones(size // 8), threads)
    targets = np.array_split(np.ones(size // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / _time(lambda: list(pool.map(np.copyto, targets, sources)), ranks) / 1e9


def _time(work: Callable[[], object], ranks: int) -> float:
    """Return the shortest of several times in seconds, or the median if there are several ranks.
    The first is left out."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) if ranks == 1 else median(times)
