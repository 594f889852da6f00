"""What a benchmark asks of JAX: the versions and threads it computes with, and products of
matrices."""

import os
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
