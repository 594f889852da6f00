"""Compare ResNet-50 in Paddle Inference: with oneDNN, with Paddle's own kernels, and the Paddle
engine's compiled `predict`.

Each turn is a new process with all cores. All predict the images of a held batch.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import backends
from lockstep.recipes import Execution
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.machine import cores
from measuring import (
    BATCH,
    alternate,
    engine,
    make_batch,
    median,
    recipe,
    record,
    round_all,
    seconds,
)

ROUNDS = 5
WARMUP = 1
TIMED = 4
FP32 = recipe(precision="fp32")


def predictor(folder: str, kernels: str, precision: str) -> float:
    """Return the images per second of Paddle Inference with the kernels of "onednn" or "paddle"."""
    from lockstep.backends.paddle.predictor import Options, open_predictor

    return rate(open_predictor(folder, Options(onednn=kernels == "onednn", precision=precision)))


def engines(_: str) -> float:
    """Return the images per second of the engine's `predict`."""
    return rate(engine(FP32, Execution.of({"backend": "paddle", "compile": "on"}))[0])


def rate(model: Any) -> float:
    images = make_batch().images
    for _ in range(WARMUP):
        model.predict(images)
    return BATCH / median(seconds(lambda: model.predict(images)) for _ in range(TIMED))


def write_program(folder: Path) -> None:
    """Write the recipe's initial weights as a program."""
    backends.load("paddle")
    from lockstep.backends.paddle.export import export

    export(FP32, initial_state(FP32).tensors, (), folder)


def run_in_process(folder: Path, name: str, *how: str) -> float:
    """Run `predictor` or `engines` in a separate process and return its result."""
    environment = os.environ | {"OMP_NUM_THREADS": str(cores())}
    command = [sys.executable, __file__, name, str(folder), *how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def compare(folder: Path, ours: tuple[str, ...], other: tuple[str, ...]) -> dict[str, Any]:
    """Measure two of these functions alternately, and return their rates and the median ratio."""
    first, second = alternate(
        partial(run_in_process, folder, *ours), partial(run_in_process, folder, *other), ROUNDS
    )
    ratio = round(median(a / b for a, b in zip(first, second, strict=True)), 3)
    return {" ".join(ours): round_all(first), " ".join(other): round_all(second), "ratio": ratio}


def main() -> None:
    if len(sys.argv) > 1:
        name, folder, *how = sys.argv[1:]
        print({"predictor": predictor, "engine": engines}[name](folder, *how))
        return
    onednn = ("predictor", "onednn", "fp32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_program(folder)
        result = {
            "what": (
                f"images a second, ResNet-50, 224 px, batch {BATCH}; {ROUNDS} turns, one process"
                " each"
            ),
            "against Paddle's kernels": compare(folder, onednn, ("predictor", "paddle", "fp32")),
            "against the engine": compare(folder, onednn, ("engine",)),
            "bf16 against fp32": compare(folder, ("predictor", "onednn", "bf16"), onednn),
        }
    record("paddle_inference", result, backend="paddle")


if __name__ == "__main__":
    main()
