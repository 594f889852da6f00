"""The device that kernels run on in the tests of this folder."""

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
