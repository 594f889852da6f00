"""A trace of some steps by PyTorch's profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

# Read at the first trace; by default traces are reported on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `trace.json` into a folder, for Perfetto or chrome://tracing: operators, and kernels on
    a GPU."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as trace:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(folder / "trace.json"))
