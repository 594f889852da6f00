"""Importing MXNet, which asks NumPy for names that have gone since, with this process's share of the cores."""

import importlib
import os

from lockstep.backends.restraint import silenced
from lockstep.machine import share_of_cores

# Read when MXNet is loaded. Left alone, it takes half of the cores where two threads share one.
threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(share_of_cores())))
"""Of this process."""
with silenced():
    mx = importlib.import_module("mxnet")
