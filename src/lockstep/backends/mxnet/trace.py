"""A trace of some steps by MXNet's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mxnet as mx

from lockstep.system.files import write_text

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
