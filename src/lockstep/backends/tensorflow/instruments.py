"""What a benchmark needs from TensorFlow: threads, versions, matrix products; and the profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from lockstep.backends import Products
from lockstep.system.machine import cores, first_number


def libraries() -> dict[str, Any]:
    """Return the versions of CUDA and cuDNN, and the number of threads on a CPU."""
    built = tf.sysconfig.get_build_info()
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS", str(cores()))
    return {
        "cuda": built.get("cuda_version"),
        "cudnn": built.get("cudnn_version"),
        "threads": first_number(threads),
    }


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    dtypes = {"bf16": tf.bfloat16, "fp16": tf.float16}
    return Products(
        lambda array, dtype: tf.cast(tf.constant(array), dtypes.get(dtype, tf.float32)),
        lambda result: result[:1, :1].numpy(),
    )


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `plugins/profile/TIME/HOST.xplane.pb` into a folder, for TensorBoard's profile plugin
    or XProf."""
    tf.profiler.experimental.start(str(folder))
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
