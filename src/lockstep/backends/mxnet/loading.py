"""Importing MXNet without its warnings and with this process's share of the cores."""

import importlib
import os

from lockstep.backends.shared.import_side_effects import silenced
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

chosen = os.environ.get("OMP_NUM_THREADS")
"""What the user or a launcher has said of threads."""
# Read when MXNet is loaded. Left alone, it takes half of the cores where two threads share one.
threads = chosen or str(share_of_cores())
"""Of this process."""
os.environ["OMP_NUM_THREADS"] = threads
try:
    with silenced():
        mx = importlib.import_module("mxnet")
except AttributeError as error:  # it asks NumPy for names that have gone since
    raise BackendError(f"MXNet needs numpy<1.24, as `make mxnet-env` installs it: {error}") from None
if chosen is None:  # nobody has chosen for the processes that this one starts
    del os.environ["OMP_NUM_THREADS"]
