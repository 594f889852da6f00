"""What a benchmark needs from PyTorch: threads, versions, matrix products; and the profiler."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lockstep.backends import Products


def libraries() -> dict[str, Any]:
    """Return the versions of CUDA, cuDNN and oneDNN, and the number of threads on a CPU."""
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "onednn": onednn and onednn[1],
        "threads": torch.get_num_threads(),
    }


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    device = torch.device("cuda" if on_gpu else "cpu")
    return Products(
        lambda array, dtype: torch.from_numpy(array).to(device, dtypes.get(dtype, torch.float32)),
        lambda result: torch.cuda.synchronize() if on_gpu else None,
    )


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
