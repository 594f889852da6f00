"""A trace of some steps by JAX's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


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
