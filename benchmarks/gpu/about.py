"""Print what results depend on besides the settings, as JSON: `python -m benchmarks.gpu.about
DEVICE`.

It is a separate process, so that a driver that hangs does not hang the campaign, which itself
imports no framework.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lockstep
from benchmarks.gpu.results import digest_of_sources
from lockstep.backends import FRAMEWORKS
from lockstep.inference.runtimes import RUNTIMES
from lockstep.system.machine import cores


def about(device: str) -> dict[str, Any]:
    """Return device, versions and the digest of Lockstep's sources."""
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "gpu_memory_gib": (
            round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if on_gpu else None
        ),
        "cores": cores(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "others": {
            name: found
            for name in (*FRAMEWORKS, *RUNTIMES)
            if (found := _of_row(name)) and name != "torch"
        },
        "lockstep": lockstep.__version__,
        "sources": digest_of_sources(Path(lockstep.__file__).parent),
    }


def _of_row(name: str) -> str | None:
    return (FRAMEWORKS.get(name) or RUNTIMES[name]).version()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(device: str) -> None:
    """Print the JSON, or end with a message if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "PyTorch finds no GPU (torch.cuda.is_available() is false); a CUDA build of torch and"
            " NVIDIA's driver are expected. To try the campaign without a GPU: --device cpu --tiny"
        )
    print(json.dumps(about(device), allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1])
