"""Compare the PyTorch engine with `auto` settings on a CPU with a hand-written loop in NCHW, in
NHWC, and in NHWC compiled.

Every turn is a separate process, because PyTorch compiles and chooses layouts once in a process. To
simulate a processor that has only AVX2, set ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
MKL_ENABLE_INSTRUCTIONS=AVX2. The name of the result file contains the kind of processor, avx2 or
avx512.
"""

import json
import time
from collections.abc import Callable

import numpy as np

from lockstep import backends
from lockstep.recipes import Execution
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.machine import arithmetic
from measuring import describe_load, list_figures, make_parser, median, recipe, record, take_turns

WHO = ("engine", "NCHW", "NHWC", "NHWC compiled")
LONG_EPOCH_STEPS = 100_000
"""The engine's single epoch has this many steps, long enough that it compiles wherever compiling
saves time."""
WARMUP_STEPS = 2


def engine_step(precision: str, size: int, batch: int) -> Callable[[], object]:
    """Return the engine's step with `auto` settings."""
    from lockstep.data import Batch

    settings = recipe(
        precision=precision, image_size=size, global_batch_images=batch, epochs=1, warmup_epochs=0
    )
    backend = backends.load("torch")
    world = backend.world(Execution())
    built = backend.engine(settings, np.full(LONG_EPOCH_STEPS, 0.001), world, Execution())
    built.write(initial_state(settings))
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    held = Batch(images, random.integers(0, 1000, batch))
    return lambda: built.fetch(built.train([held], 0))


def hand_written_step(who: str, precision: str, size: int, batch: int) -> Callable[[], object]:
    """Return a step as most people write it, on images that are already normalised."""
    import torch
    import torch.nn.functional as F

    from lockstep.backends.torch.model import Model
    from lockstep.models.architectures import MODELS

    layout = torch.contiguous_format if who == "NCHW" else torch.channels_last
    model = Model(MODELS["resnet50"], recipe())
    model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=layout)
    labels = torch.randint(0, 1000, (batch,))
    forward = torch.compile(model) if who == "NHWC compiled" else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def turn(who: str, precision: str, size: int, batch: int, steps: int) -> dict[str, float]:
    """Run one turn; return images per second of wall and of processor time, and the seconds to the
    end of the first step."""
    began = time.perf_counter()
    step = (
        engine_step(precision, size, batch)
        if who == "engine"
        else hand_written_step(who, precision, size, batch)
    )
    step()
    first_sec = time.perf_counter() - began
    for _ in range(WARMUP_STEPS - 1):
        step()
    times = []
    processor_began = time.process_time()
    for _ in range(steps):
        step_began = time.perf_counter()
        step()
        times.append(time.perf_counter() - step_began)
    processor_sec = time.process_time() - processor_began
    return {
        "images_per_sec": batch / median(times),
        "images_per_processor_sec": batch * steps / processor_sec,
        "first_step_sec": first_sec,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--precision", default=arithmetic().pays)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn", nargs=2, help="Run one turn in this process.")
    options = parser.parse_args()
    if options.turn:
        who = options.turn[0]
        figures = turn(who, options.precision, options.size, options.batch, options.steps)
        print(json.dumps(figures))
        return
    turns = take_turns(WHO, options.turns)
    rates = list_figures(turns, "images_per_sec")
    by_processor = list_figures(turns, "images_per_processor_sec")
    kind = "avx512" if "AVX-512" in arithmetic().extensions else "avx2"
    record(
        f"cpu_layouts_{kind}_{options.precision}",
        {
            "what": (
                f"images a second, ResNet-50 training, {options.size} px, batch {options.batch};"
                f" {options.turns} turns"
            ),
            **describe_load(),
            "images_per_sec": rates,
            "images_per_processor_sec": by_processor,
            "first_step_sec": list_figures(turns, "first_step_sec"),
            "engine_over_best": _over_best(rates),
            "engine_over_best_by_processor_time": _over_best(by_processor),
        },
    )


def _over_best(rates: dict[str, list[float]]) -> float:
    """Return the median rate of the engine over the best median of the others."""
    return round(median(rates["engine"]) / max(median(rates[who]) for who in WHO[1:]), 3)


if __name__ == "__main__":
    main()
