"""A trace of some steps by Paddle's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paddle
from paddle.profiler import Profiler, ProfilerTarget


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `trace.json` into a folder, for chrome://tracing or Perfetto: operators, and kernels on
    a GPU."""
    on_gpu = paddle.device.get_device().startswith("gpu")
    targets = [ProfilerTarget.CPU, *([ProfilerTarget.GPU] if on_gpu else [])]
    trace = Profiler(
        targets=targets,
        on_trace_ready=lambda done: done.export(str(folder / "trace.json"), format="json"),
    )
    trace.start()
    try:
        yield
        if on_gpu:
            paddle.device.synchronize()
    finally:
        trace.stop()
