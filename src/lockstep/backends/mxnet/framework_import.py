"""Importing MXNet without its warnings, and with this process's share of the cores."""

import importlib
import os

from lockstep.backends.shared.import_side_effects import silence_output
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

_chosen = os.environ.get("OMP_NUM_THREADS")
"""Number of threads that the user or a launcher has chosen, if any."""
# Read when MXNet is loaded. Without it, MXNet uses half of the cores where two threads share one.
threads = _chosen or str(share_of_cores())
"""Number of threads of this process."""
os.environ["OMP_NUM_THREADS"] = threads
try:
    with silence_output():
        mx = importlib.import_module("mxnet")
except AttributeError as error:  # it uses names that newer versions of NumPy do not have
    raise BackendError(
        f"MXNet needs numpy<1.24, as `make mxnet-env` installs it: {error}"
    ) from None
if _chosen is None:  # the processes that this one starts choose for themselves
    del os.environ["OMP_NUM_THREADS"]
