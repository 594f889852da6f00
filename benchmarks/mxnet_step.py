"""Compare the MXNet engine's step with the usual Gluon code for the same model.

The usual code is the model zoo's resnet50_v1, hybridised, with `gluon.Trainer`. Its bf16 comes from
MXNet's own AMP. Each turn is a new process with all cores. Both sides use the images of a held
batch.

Run it with the Python of MXNet's environment: .venv-mxnet/bin/python benchmarks/mxnet_step.py
"""

import os
import subprocess
import sys
from dataclasses import replace
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

ROUNDS = 5
WARMUP = 3
STEPS = 4
TIMES = 3


def lockstep(precision: str) -> float:
    """Return the engine's images per second."""
    # The model zoo's resnet50_v1 strides in the first 1x1, and so does this model. v1.5 is 6 % more
    # work.
    built, _ = engine(recipe(precision=precision, model="resnet50-v1"), Execution(backend="mxnet"))
    batch = replace(make_batch(), is_held=True)  # in MXNet's arrays, as for Gluon
    built.fetch(built.train([batch] * WARMUP, 0))
    return (
        STEPS
        * BATCH
        / median(
            seconds(lambda: built.fetch(built.train([batch] * STEPS, 0))) for _ in range(TIMES)
        )
    )


def gluon(precision: str) -> float:
    """Return the images per second of a Gluon loop written as in its guide, on images that are
    already normalised."""
    import mxnet as mx
    from mxnet.contrib import amp

    if precision == "bf16":
        amp.init("bfloat16")
    net = mx.gluon.model_zoo.vision.resnet50_v1()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 0.001, "momentum": 0.875, "wd": 1 / 32768}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
    batch = make_batch()
    normalised = (batch.images - np.asarray(recipe().mean)) / np.asarray(recipe().std)
    images = mx.nd.array(normalised.transpose(0, 3, 1, 2))
    labels = mx.nd.array(batch.labels)

    def steps(count: int) -> None:
        total = 0
        for _ in range(count):
            with mx.autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(BATCH)
            total = total + loss.mean()
        total.asscalar()

    steps(WARMUP)
    return STEPS * BATCH / median(seconds(lambda: steps(STEPS)) for _ in range(TIMES))


def run_in_process(*what: str) -> float:
    """Run `lockstep` or `gluon` in a separate process and return its result."""
    environment = os.environ | {"OMP_NUM_THREADS": str(cores())}
    done = subprocess.run(
        [sys.executable, __file__, *what],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) > 1:
        name, precision = sys.argv[1:]
        print({"lockstep": lockstep, "gluon": gluon}[name](precision))
        return
    result: dict[str, Any] = {
        "what": (
            f"images a second, ResNet-50, 224 px, batch {BATCH}; {ROUNDS} turns, one process each:"
            f" the median of {TIMES} times {STEPS} steps"
        )
    }
    for precision in ("fp32", "bf16"):
        ours, usual = alternate(
            partial(run_in_process, "lockstep", precision),
            partial(run_in_process, "gluon", precision),
            ROUNDS,
        )
        ratio = round(median(a / b for a, b in zip(ours, usual, strict=True)), 3)
        result[precision] = {"lockstep": round_all(ours), "gluon": round_all(usual), "ratio": ratio}
    record("mxnet_step", result, "mxnet")


if __name__ == "__main__":
    main()
