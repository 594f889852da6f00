"""The machine this process runs on."""

import os
import platform
from pathlib import Path


def cores() -> int:
    """Return the cores this process may use, or where the system does not say, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores() -> int:
    """Return the cores for this process, where a launcher started several on the machine."""
    return max(cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def memory_bytes() -> int:
    """Return the size of the main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
