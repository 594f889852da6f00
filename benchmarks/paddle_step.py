"""Compare the Paddle engine's step with the usual code for the same model.

The usual code is paddle.vision's resnet50 under `paddle.Model.fit`. The script also compares the
engine's inference compiled, which uses oneDNN, and not compiled, which does not. Each turn is a new
process with all cores. All use the images of a held batch.
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lockstep.recipes import Execution
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

ROUNDS = 3
WARMUP = 1
TIMED = 4


def lockstep_step(compile: str = "auto") -> float:
    """Return the engine's images per second."""
    built, _ = engine(
        recipe(precision="fp32"), Execution.of({"backend": "paddle", "compile": compile})
    )
    batch = make_batch()
    return rate(lambda: built.fetch(built.train([batch], 0)))


def fit() -> float:
    """Return the images per second of `paddle.Model.fit` written as in its guide, with two
    exceptions.

    It uses all cores, which Paddle does not do by default. Its images are already normalised.
    """
    warnings.simplefilter("ignore")
    import paddle

    paddle.base.core.set_num_threads(cores())
    batch = make_batch()
    images = (
        ((batch.images - np.asarray(recipe().mean)) / np.asarray(recipe().std))
        .astype(np.float32)
        .transpose(0, 3, 1, 2)
    )
    ended: list[float] = []

    class Images(paddle.io.Dataset):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return images[index % BATCH], np.array([batch.labels[index % BATCH]])

        def __len__(self) -> int:
            return BATCH * (WARMUP + TIMED)

    class Clock(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            ended.append(time.perf_counter())

    model = paddle.Model(paddle.vision.models.resnet50())
    optimizer = paddle.optimizer.Momentum(
        0.001, 0.875, parameters=model.parameters(), weight_decay=1 / 32768
    )
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss())
    model.fit(Images(), batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[Clock()])
    return BATCH / median(np.diff(ended[WARMUP - 1 :]))


def inference(compile: str) -> float:
    """Return the images per second of the engine's `predict`."""
    built, _ = engine(
        recipe(precision="fp32"), Execution.of({"backend": "paddle", "compile": compile})
    )
    images = make_batch().images
    return rate(lambda: built.predict(images))


def rate(step: Callable[[], object]) -> float:
    for _ in range(WARMUP):
        step()
    return BATCH / median(seconds(step) for _ in range(TIMED))


def run_in_process(*what: str) -> float:
    """Run one of the measuring functions in a separate process and return its result."""
    environment = os.environ | {"OMP_NUM_THREADS": str(cores())}
    done = subprocess.run(
        [sys.executable, __file__, *what],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout.splitlines()[-1])


def compare(ours: tuple[str, ...], usual: tuple[str, ...]) -> dict[str, Any]:
    """Measure two of these functions alternately, and return their rates and the median ratio."""
    first, second = alternate(
        partial(run_in_process, *ours), partial(run_in_process, *usual), ROUNDS
    )
    ratio = round(median(a / b for a, b in zip(first, second, strict=True)), 3)
    return {" ".join(ours): round_all(first), " ".join(usual): round_all(second), "ratio": ratio}


def main() -> None:
    if len(sys.argv) > 1:
        name, *how = sys.argv[1:]
        print({"lockstep": lockstep_step, "fit": fit, "inference": inference}[name](*how))
        return
    record(
        "paddle_step",
        {
            "what": (
                f"images a second, ResNet-50, fp32, 224 px, batch {BATCH}; {ROUNDS} turns, one"
                " process each"
            ),
            "training": compare(("lockstep", "auto"), ("fit",)),
            "training uncompiled": compare(("lockstep", "off"), ("fit",)),
            "inference": compare(("inference", "on"), ("inference", "off")),
        },
        backend="paddle",
    )


if __name__ == "__main__":
    main()
