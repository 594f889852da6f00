"""The rates a machine reaches: matrix products by the framework that is measured, and copies of memory."""

import operator
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from lockstep.system.machine import share_of_cores

PRODUCT_SIZE = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of the square matrices: large enough that reading them takes no part of the time."""
COPY_BYTES = {"cpu": 2**28, "gpu": 2**30}
"""More than any cache holds."""
SECONDS = 0.5
"""Products and copies are repeated for so long. The fastest counts, since nothing runs faster than a machine can; of several
ranks, whose rates are added up, the median: one rank is fastest when others pause, and each would count so."""


@dataclass(frozen=True)
class Arithmetic:
    """What it takes to multiply matrices with a framework."""

    tensor: Callable[[np.ndarray, str], Any]
    """Put an array onto the device, in a precision."""
    wait: Callable[[Any], object]
    """Return when a result is there."""
    product: Callable[[Any, Any], Any] = operator.matmul


def _torch(on_gpu: bool) -> Arithmetic:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    device = torch.device("cuda" if on_gpu else "cpu")
    return Arithmetic(
        lambda array, dtype: torch.from_numpy(array).to(device, dtypes.get(dtype, torch.float32)),
        lambda result: torch.cuda.synchronize() if on_gpu else None,
    )


def _tensorflow(on_gpu: bool) -> Arithmetic:
    from lockstep.backends.tensorflow.loading import tf

    dtypes = {"bf16": tf.bfloat16, "fp16": tf.float16}
    return Arithmetic(
        lambda array, dtype: tf.cast(tf.constant(array), dtypes.get(dtype, tf.float32)),
        lambda result: result[:1, :1].numpy(),
    )


def _paddle(on_gpu: bool) -> Arithmetic:
    from lockstep.backends.paddle.loading import paddle

    names = {"bf16": "bfloat16", "fp16": "float16"}
    return Arithmetic(
        lambda array, dtype: paddle.to_tensor(array).astype(names.get(dtype, "float32")),
        lambda result: paddle.device.synchronize() if on_gpu else None,
    )


def _mxnet(on_gpu: bool) -> Arithmetic:
    from lockstep.backends.mxnet.loading import mx

    names = {"bf16": "bfloat16", "fp16": "float16"}
    context = mx.gpu(int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else mx.cpu()
    return Arithmetic(
        lambda array, dtype: mx.nd.array(array, context).astype(names.get(dtype, "float32")),
        lambda result: result.wait_to_read(),
        lambda a, b: mx.nd.dot(a, b),
    )


def _reference(on_gpu: bool) -> Arithmetic:
    # It computes in float64 whatever is rounded in between.
    return Arithmetic(lambda array, dtype: array.astype(np.float64), lambda result: None)


ARITHMETIC: dict[str, Callable[[bool], Arithmetic]] = {
    "mxnet": _mxnet,
    "paddle": _paddle,
    "reference": _reference,
    "tensorflow": _tensorflow,
    "torch": _torch,
}


def gemm_gflops(backend: str, dtype: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a large matrix product, in GFLOP/s, on all that this process may use, one of so many that measure.

    Raises whatever the framework does where it has no such product.
    """
    size = PRODUCT_SIZE["gpu" if on_gpu else "cpu"]
    arithmetic = ARITHMETIC[backend](on_gpu)
    drawn = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    a, b = (arithmetic.tensor(drawn / np.sqrt(size), dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: arithmetic.wait(arithmetic.product(a, b)), ranks) / 1e9


def copy_gb_per_sec(backend: str, *, on_gpu: bool, ranks: int) -> float:
    """Return the rate of a copy by one of so many ranks, in 1e9 bytes a second, read and written bytes counted each.

    On a CPU by NumPy in a thread for each core, whatever the framework: few of them copy with more than one.
    """
    if on_gpu:
        size, arithmetic = COPY_BYTES["gpu"], ARITHMETIC[backend](True)
        values = arithmetic.tensor(np.zeros((1024, size // 4096), np.float32), "fp32")
        return 2 * size / _seconds(lambda: arithmetic.wait(-values), ranks) / 1e9
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
