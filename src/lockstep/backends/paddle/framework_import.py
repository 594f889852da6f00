"""Importing Paddle without its start-up messages and its SIGTERM handler, and with this process's
share of the cores."""

import importlib
import os
import sys

from lockstep.backends.shared.import_side_effects import keep_sigterm, silence_output
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

if "tensorflow" in sys.modules and "paddle" not in sys.modules:
    # Compiled code would end the process without a message: both contain libraries with the same
    # names.
    raise BackendError(
        "Paddle ends a process that imports it after TensorFlow: import paddle first, or use a"
        " process for each"
    )
os.environ.setdefault("GLOG_minloglevel", "2")  # errors only
_chosen = os.environ.get("OMP_NUM_THREADS")
threads = int(_chosen or share_of_cores())
"""Number of threads of this process. Paddle uses one unless the environment sets another number
when it is imported."""
os.environ["OMP_NUM_THREADS"] = str(threads)
with silence_output(), keep_sigterm():
    paddle = importlib.import_module("paddle")
paddle.base.core.set_num_threads(threads)  # for matrix products, which have a separate setting
if _chosen is None:  # the processes that this one starts choose for themselves
    del os.environ["OMP_NUM_THREADS"]
