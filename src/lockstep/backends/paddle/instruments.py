"""What a benchmark needs from Paddle: threads, versions, matrix products; and the profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
from paddle.profiler import Profiler, ProfilerTarget

from lockstep.backends import Products
from lockstep.backends.paddle import framework_import


def libraries() -> dict[str, Any]:
    """Return the versions of CUDA and cuDNN, and the number of threads on a CPU."""
    on_gpu = paddle.is_compiled_with_cuda()  # else it names its versions "False"
    cuda, cudnn = (paddle.version.cuda(), paddle.version.cudnn()) if on_gpu else (None, None)
    return {"cuda": cuda, "cudnn": cudnn, "threads": framework_import.threads}


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return Products(
        lambda array, dtype: paddle.to_tensor(array).astype(names.get(dtype, "float32")),
        lambda result: paddle.device.synchronize() if on_gpu else None,
    )


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
