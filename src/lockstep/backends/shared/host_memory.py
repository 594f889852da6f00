"""Making glibc's allocator keep memory between batches."""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system, for this process.

    On a CPU every batch allocates and frees the same gigabytes. By default the kernel maps and
    zeroes each large block again. In measurements this cost 6 % of a ResNet-50 training step and a
    quarter of a batch in Paddle Inference. Other C libraries do not have this call and are left
    unchanged.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
