"""What a benchmark needs from MXNet: threads, versions, matrix products; and the profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mxnet as mx

from lockstep.backends import Products
from lockstep.backends.mxnet import framework_import
from lockstep.system.files import write_text
from lockstep.system.machine import first_number


def libraries() -> dict[str, Any]:
    """Return the number of threads on a CPU."""
    return {"threads": first_number(framework_import.threads)}


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    context = mx.gpu(int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else mx.cpu()
    return Products(
        lambda array, dtype: mx.nd.array(array, context).astype(names.get(dtype, "float32")),
        lambda result: result.wait_to_read(),
        lambda a, b: mx.nd.dot(a, b),
    )


_BEGINS = '"traceEvents": [\n'


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `trace.json` into a folder, for chrome://tracing or Perfetto: operators, and kernels on
    a GPU."""
    file = folder / "trace.json"
    mx.nd.waitall()
    # With continuous dumping, which is the default, the profiler cannot be configured a second
    # time.
    mx.profiler.set_config(profile_all=True, continuous_dump=False, filename=str(file))
    mx.profiler.set_state("run")
    try:
        yield
        mx.nd.waitall()
    finally:
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        # The events of a second trace in a process begin with the comma that would separate them
        # from the first trace.
        write_text(file, file.read_text(encoding="utf-8").replace(f"{_BEGINS},\n", _BEGINS, 1))
