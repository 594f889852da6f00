"""Size and speed of programs for phones, on this machine's processor, next to native inference.

ResNet-50 at 224 px with random weights, one image at a time. Each contender is a process that holds
its program; they compute alternately, and the median of their times counts.
"""

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from exports import prepare
from lockstep.data.textures import draw_data_set
from lockstep.inference.programs import find_program
from lockstep.inference.runtimes import open_runtime
from lockstep.inference.targets import TARGETS
from lockstep.recipes import Execution
from lockstep.weights import certificate, open_weights
from measuring import record

ROUNDS = 40
IMAGES = 4
"""Images that a contender computes in a round."""
NATIVE = "native"
CONTENDERS = [
    (NATIVE, "fp32"),
    *((to, precision) for to in ("executorch", "litert") for precision in ("fp32", "int8")),
]
_held: list[Any] = []


def hold(source: Path, folder: Path, to: str, precision: str) -> dict[str, Any]:
    """Export, and hold what computes in this process; return the figures of the export."""
    if to == NATIVE:
        weights = open_weights(source)
        _held.append(open_runtime(NATIVE, weights, Execution(), most_images=1).__enter__())
        return {"MB": round(source.stat().st_size / 1e6, 1)}
    how: Any = precision
    if precision == "int8":
        # What random weights classify right is chance.
        how = lockstep.Int8(folder / "data", images=32, tolerance=100.0)
        draw_data_set(folder / "data", train_images=40, val_images=10)
    target = folder / "to"
    began = time.perf_counter()
    result = lockstep.load(source).export(target, to=to, precision=how)
    seconds = time.perf_counter() - began
    _held.append(find_program(target).load().__enter__())
    return {
        "MB": round((target / str(TARGETS[to].phone_file)).stat().st_size / 1e6, 1),
        "largest difference": float(f"{result['comparison']['largest_difference']:.1e}"),
        "runtime": result["comparison"]["runtime"],
        "seconds of the export": round(seconds, 1),
    }


def measure(squares: np.ndarray) -> list[float]:
    """Return the milliseconds of each square."""
    times = []
    for square in squares:
        began = time.perf_counter()
        _held[0].predict(square[None])
        times.append(1000 * (time.perf_counter() - began))
    return times


def main() -> None:
    squares = certificate.draw_images(224)[:IMAGES]
    pools = {
        contender: ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        for contender in CONTENDERS
    }
    rows = {}
    times: dict[tuple[str, str], list[float]] = {contender: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="lockstep-phones-") as name:
        source = pools[NATIVE, "fp32"].submit(prepare, "resnet50", Path(name)).result()
        for (to, precision), pool in pools.items():
            folder = Path(name) / f"{to}-{precision}"
            folder.mkdir()
            rows[to, precision] = pool.submit(hold, source, folder, to, precision).result()
            pool.submit(measure, squares).result()  # the first image prepares
            print(to, precision, rows[to, precision], flush=True)
        for _ in range(ROUNDS):
            for contender, pool in pools.items():
                times[contender] += pool.submit(measure, squares).result()
    for pool in pools.values():
        pool.shutdown()
    for contender, row in rows.items():
        row["ms"] = round(statistics.median(times[contender]), 1)
        row["fastest ms"] = round(min(times[contender]), 1)
    record(
        "phone_programs",
        {
            "what": "ResNet-50, 224 px, one image, this machine's processor (not a phone)",
            **{f"{to}, {precision}": row for (to, precision), row in rows.items()},
        },
    )


if __name__ == "__main__":
    main()
