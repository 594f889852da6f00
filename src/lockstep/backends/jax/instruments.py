"""What a benchmark needs from JAX: threads, versions, matrix products; and the profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.backends import Products
from lockstep.backends.jax.world import THREADS
from lockstep.system.machine import cores, first_number


def libraries() -> dict[str, Any]:
    """Return the number of threads on a CPU."""
    return {"threads": first_number(os.environ.get(THREADS, str(cores())))}


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    dtypes = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
    device = jax.local_devices(backend=None if on_gpu else "cpu")[0]
    return Products(
        lambda array, dtype: jax.device_put(
            jnp.asarray(array, dtypes.get(dtype, jnp.float32)), device
        ),
        jax.block_until_ready,
        jax.jit(jnp.matmul),
    )


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `plugins/profile/TIME/HOST.xplane.pb` into a folder, for TensorBoard's profile plugin
    or XProf."""
    jax.profiler.start_trace(str(folder))
    try:
        yield
    finally:
        jax.block_until_ready(jax.live_arrays())
        jax.profiler.stop_trace()
        for copy in folder.rglob("*.trace.json.gz"):  # the same trace for an older viewer
            copy.unlink()
