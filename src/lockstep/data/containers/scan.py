"""C of our own, `_scan.c`: it lists what in TFRecord files and tars is as it usually is, and frames TFRecord's records."""

import importlib
from contextlib import suppress
from typing import Any

scan: Any = None
"""The compiled module; None where it was not built or the processor has no SSE 4.2: Python does all of its work then."""
MISSING = (
    "it takes GCC when the package is built (or the wheel for Linux on x86-64), and SSE 4.2; Python does its work, with the "
    "same result"
)
with suppress(ImportError):
    scan = importlib.import_module("lockstep.data.containers._scan")
