"""Part: `lockstep verify` on the device and on the CPU, in every precision, several at a time."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu.timing import Ground, Say

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
AT_A_TIME = 8
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FEW_THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
"""Several processes share the cores."""


def measure(ground: Ground, say: Say) -> None:
    """Write a row for every device and precision."""
    devices = ("cpu",) if ground.device == "cpu" else ("cuda", "cpu")
    cells = [
        (device, precision)
        for precision in PRECISIONS[: 1 if ground.tiny else None]
        for device in devices
    ]
    with ThreadPoolExecutor(min(AT_A_TIME, len(cells))) as pool:
        for row in pool.map(lambda cell: _verified(cell[0], cell[1], ground), cells):
            say(row)


def _verified(device: str, precision: str, ground: Ground) -> dict[str, Any]:
    """Return the row of one run of the command."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "verify",
        "--backends",
        "torch",
        "--precision",
        precision,
        "--json",
    ]
    command += ["--steps", "3"] if ground.tiny else []
    environment = os.environ | FEW_THREADS | (NO_GPU if device == "cpu" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    row: dict[str, Any] = {
        "what": "verify",
        "device": device,
        "precision": precision,
        "exit_code": done.returncode,
    }
    try:
        engine = json.loads(done.stdout)["engines"]["torch"]
    except (ValueError, KeyError):
        return row | {"passed": False, "reason": done.stderr[-600:]}
    if "error" in engine:
        return row | {"passed": False, "reason": str(engine["error"])[:600]}
    found = judged(engine)
    is_on_cpu = str(found["ran_on"]).startswith("CPU")
    return row | found | {"passed": found["passed"] and is_on_cpu == (device == "cpu")}


def judged(engine: dict[str, Any]) -> dict[str, Any]:
    """Return whether an engine of a report passed, what it ran on, and the largest share of a
    bound."""
    shares = {
        row["quantity"]: (row["relative"] or 0) / row["bound"]
        for row in engine["rows"]
        if row["bound"]
    }
    worst = max(shares, key=lambda name: shares[name])
    return {
        "passed": all(row["passed"] for row in engine["rows"]),
        "ran_on": engine["device"],
        "largest_share_of_a_bound": shares[worst],
        "of": worst,
        "failed": [row["quantity"] for row in engine["rows"] if not row["passed"]],
    }
