"""Kernels run on a GPU or, with TRITON_INTERPRET=1, in Triton's interpreter, which must be chosen
before Triton is imported.

On a CPU, `tests/backends/test_torch_kernels.py` runs this folder in a process that has chosen it.
"""

import os

from tests.backends.conftest import BACKENDS, DEVICE


def _run_here() -> bool:
    if "torch" not in BACKENDS:
        return False
    import torch

    return os.environ.get("TRITON_INTERPRET") == "1" or (
        DEVICE != "cpu" and torch.cuda.is_available()
    )


collect_ignore_glob = [] if _run_here() else ["test_*.py"]
