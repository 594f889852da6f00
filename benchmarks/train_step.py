"""Compare the engine's bf16 step with the loop most people write: eager, float32, NCHW. Each turn
is a new process."""

import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from lockstep.backends.torch.model import Model
from lockstep.models.architectures import MODELS
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
WARMUP = 2
TIMED = 6


def lockstep_step() -> float:
    """Return the engine's images per second."""
    built, _ = engine(recipe())
    batch = make_batch()
    built.fetch(built.train([batch] * WARMUP, 0))
    times = [seconds(lambda: built.fetch(built.train([batch], 0))) for _ in range(TIMED)]
    return BATCH / median(times)


def usual_step() -> float:
    """Return the usual loop's images per second, on the same architecture and a batch that is
    already normalised."""

    model = Model(MODELS["resnet50"], recipe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(BATCH, 3, 224, 224)
    labels = torch.randint(0, 1000, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    for _ in range(WARMUP):
        step()
    return BATCH / median(seconds(step) for _ in range(TIMED))


def product_gflops(dtype: str) -> float:
    """Return the rate of a large matrix product in GFLOP/s, which is the upper limit for a step."""

    a = torch.randn(2048, 2048).to(getattr(torch, dtype))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / median(times) / 1e9


def run_in_process(what: str) -> float:
    """Run one of the measurements in a separate process and return its result."""
    done = subprocess.run(
        [sys.executable, __file__, what], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    single = {"lockstep": lockstep_step, "usual": usual_step}
    single |= {
        "fp32": lambda: product_gflops("float32"),
        "bf16": lambda: product_gflops("bfloat16"),
    }
    if len(sys.argv) > 1:
        print(single[sys.argv[1]]())
        return
    ours, usual = alternate(
        lambda: run_in_process("lockstep"), lambda: run_in_process("usual"), ROUNDS
    )
    record(
        "train_step",
        {
            "what": (
                f"images a second, ResNet-50 training, 224 px, batch {BATCH}; {ROUNDS} turns, one"
                " process each"
            ),
            "lockstep_bf16": round_all(ours),
            "eager_fp32_nchw": round_all(usual),
            "ratio": round(median(a / b for a, b in zip(ours, usual, strict=True)), 3),
            "matrix_product_gflops": {
                name: round(run_in_process(name), 1) for name in ("fp32", "bf16")
            },
            "step_gflop_per_image": 24.6,
        },
    )


if __name__ == "__main__":
    main()
