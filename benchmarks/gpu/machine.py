"""Part: what `lockstep doctor` says, and the rates that the device cannot exceed."""

import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.timing import Ground, Say, median_ms

PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}


def measure(ground: Ground, say: Say) -> None:
    """Write a row with what doctor prints, one for the copy, and one for the products of each
    precision."""
    if not ground.tiny:  # it imports every framework that is installed
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "doctor"],
            capture_output=True,
            text=True,
            check=False,
        )
        say(
            {
                "what": "doctor",
                "exit_code": done.returncode,
                "lines": done.stdout.splitlines(),
                "errors": done.stderr[-1000:],
            }
        )
    say({"what": "copy", "gb_per_sec": copy_gb_per_sec(ground)})
    for precision, gflops in _products(ground):
        say({"what": "product", "precision": precision, "gflops": gflops})


def copy_gb_per_sec(ground: Ground) -> float:
    """Return the rate of a copy on the device in 1e9 bytes per second, bytes read plus bytes
    written."""
    count = COPY_BYTES["cpu" if ground.tiny else ground.device] // 4
    source = torch.randn(count, device=ground.device)
    target = torch.empty_like(source)
    return (
        8 * count / median_ms(lambda: target.copy_(source), ground, 5 if ground.tiny else 20) / 1e6
    )


def _products(ground: Ground) -> Iterator[tuple[str, float]]:
    """Yield the rate of products of square matrices of random numbers, in GFLOP/s. Zeros would be
    faster than real data."""
    size = PRODUCT_SIZE["cpu" if ground.tiny else ground.device]
    a, b = (torch.randn(size, size, device=ground.device) for _ in range(2))
    kinds = {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    for precision, dtype in kinds.items():
        if ground.device == "cpu" and precision in ("tf32", "fp16"):
            continue  # a CPU has no TF32, and most emulate fp16
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        x = a.to(dtype)
        y = b.to(dtype)
        yield (
            precision,
            2 * size**3 / median_ms(lambda x=x, y=y: x @ y, ground, 5 if ground.tiny else 20) / 1e6,
        )  # type: ignore[misc]
