"""What a speed depends on outside the program: a run's `environment`, libraries, threads, clocks,
GPU and driver."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from lockstep import backends
from lockstep.inference.runtimes import RUNTIMES, count_threads
from lockstep.runs.environment import describe_environment

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)
_QUERIES = {
    "gpu": "name",
    "driver": "driver_version",
    "gpu_memory": "memory.total",
    "gpu_clock": "clocks.sm",
    "gpu_clock_max": "clocks.max.sm",
    "gpu_power_limit": "power.limit",
}


def fingerprint(name: str) -> dict[str, Any]:
    """Return versions, machine, threads and clocks as plain values; None for what is not reported.

    `name` is a backend, or a runtime that is not native. It must be installed. A framework is
    loaded.
    """
    if name in RUNTIMES:
        libraries: dict[str, Any] = {"threads": count_threads()}
        about = describe_environment(None) | {name: RUNTIMES[name].version()}
    else:
        libraries = backends.load(name).libraries()
        about = describe_environment(name)
    threads = {"used": libraries.pop("threads")}
    for variable in THREAD_VARIABLES:
        if variable in os.environ:
            threads[variable] = os.environ[variable]
    fields = {
        "threads": threads,
        "processor_mhz": _read_clocks(),
        "processor_mhz_max": _read_highest_clock(),
        "governor": _read(_CPU_0 / "scaling_governor"),
        "gpus": query_gpus(),
    }
    return about | dict.fromkeys(("cuda", "cudnn", "onednn")) | libraries | fields


_CPU_0 = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def _read_clocks() -> list[float] | None:
    """Return the clock of every core at this moment, in MHz."""
    text = _read(Path("/proc/cpuinfo")) or ""
    lines = [line for line in text.splitlines() if line.startswith("cpu MHz")]
    return [float(line.partition(":")[2]) for line in lines] or None


def _read_highest_clock() -> float | None:
    khz = _read(_CPU_0 / "cpuinfo_max_freq")
    return int(khz) / 1000 if khz else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def query_gpus() -> list[dict[str, str]]:
    """Return what NVIDIA's driver reports for every GPU; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(_QUERIES, row, strict=True)) for row in rows if len(row) == len(_QUERIES)]
