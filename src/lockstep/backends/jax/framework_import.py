"""Importing JAX with GPU memory that grows as needed."""

import importlib
import os

from lockstep.backends.shared.import_side_effects import silence_output

# Otherwise JAX takes three quarters of a GPU's memory when it first computes.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's start-up messages
with silence_output():
    jax = importlib.import_module("jax")
