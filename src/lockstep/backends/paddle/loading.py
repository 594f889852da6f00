"""Importing Paddle without its greetings and its handler of SIGTERM, and with all cores."""

import importlib
import os
import sys

from lockstep.backends.shared.import_side_effects import keeping_sigterm, silenced
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

if "tensorflow" in sys.modules and "paddle" not in sys.modules:
    # Without a word, from compiled code: both have libraries of the same names in them.
    raise BackendError(
        "Paddle ends a process that imports it after TensorFlow: import paddle first, or use a process for each"
    )
os.environ.setdefault("GLOG_minloglevel", "2")  # errors alone
_chosen = os.environ.get("OMP_NUM_THREADS")
threads = int(_chosen or share_of_cores())
"""Of this process. Paddle takes one unless the environment says otherwise when it is imported."""
os.environ["OMP_NUM_THREADS"] = str(threads)
with silenced(), keeping_sigterm():
    paddle = importlib.import_module("paddle")
paddle.base.core.set_num_threads(threads)  # of its matrix products, which have one of their own
if _chosen is None:  # nobody has chosen for the processes that this one starts
    del os.environ["OMP_NUM_THREADS"]
