"""Compare runtimes with PyTorch's eager ResNet-50 in NCHW: images a second, and the
first answer of a process.

Every turn is a separate process, because threads and compiled code of one runtime must not disturb
the next one. The eager model gets normalised images; the runtimes get bytes. int8 is what `lockstep
export --to onnx --precision int8` writes, calibrated on a few random images: its speed does not
depend on them.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import lockstep
from lockstep import backends
from lockstep.inference.runtimes import (
    NATIVE,
    count_threads,
    find_row,
    list_installed,
    open_runtime,
)
from lockstep.inference.runtimes.exported import open_exported
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.machine import arithmetic, peak_memory_bytes
from lockstep.weights import LOCKSTEP, Weights
from lockstep.weights.checkpoint import write_weights
from measuring import (
    Turns,
    describe_load,
    list_figures,
    make_parser,
    median,
    recipe,
    record,
    take_turns,
)

EAGER = "eager NCHW fp32"
TARGETS = {"bf16": 3.5, "fp32": 1.5}
"""The best runtime without int8 over the eager loop, by the best precision that the processor
multiplies."""
INT8_TARGET = 1.5
"""The best runtime in int8 over the best of the others, where int8 is in hardware."""
INT8_RUNS_IN = ("onnxruntime", "openvino")
WARMUP = 2


def eager(settings: Recipe, images: np.ndarray) -> Callable[[], object]:
    """Return a pass of the model as most people write it, in float32."""
    backends.load("torch")  # its threads wait as briefly as those of the runtime
    import torch

    from lockstep.backends.torch.model import Model
    from lockstep.models.architectures import MODELS

    model = Model(MODELS["resnet50"], settings).eval()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float()
    x = (x - torch.tensor(settings.mean).view(3, 1, 1)) / torch.tensor(settings.std).view(3, 1, 1)

    def work() -> None:
        with torch.inference_mode():
            model(x).numpy()

    return work


def write_int8(folder: Path) -> Path:
    """Write an ONNX model in int8; return its file."""
    settings = recipe(precision="fp32", eval_crop=224, eval_resize=256)
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (256, 256, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.jpg")
    weights = folder / "initial.safetensors"
    write_weights(
        weights, initial_state(settings).tensors, {"recipe": settings.fields(), "classes": []}
    )
    target = folder / "int8"
    lockstep.load(weights).export(
        target, to="onnx", precision=lockstep.Int8(folder, tolerance=100.0), compare=False
    )
    return target / "model.onnx"


def turn(who: str, batch: int, iterations: int, started: float, int8: Path) -> dict[str, Any]:
    """Run one turn; return rates by wall and by processor time, and seconds and memory to the first
    answer and in all."""
    name, _, precision = who.rpartition(" ")
    settings = recipe(
        precision="fp32" if precision == "int8" else precision, eval_crop=224, eval_resize=256
    )
    images = np.random.default_rng(0).integers(0, 256, (batch, 224, 224, 3), dtype=np.uint8)
    if who == EAGER:
        work = eager(settings, images)
    elif precision == "int8":
        exported = open_exported(int8)
        assert exported is not None
        runtime = open_runtime(
            name,
            exported.about,
            Execution(device="cpu"),
            most_images=batch,
            exported=exported,
        )
        work = lambda: runtime.predict(images)  # noqa: E731
    else:
        weights = Weights(settings, initial_state(settings), (), Path("initial weights"), LOCKSTEP)
        runtime = open_runtime(name, weights, Execution(device="cpu"), most_images=batch)
        work = lambda: runtime.predict(images)  # noqa: E731
    work()
    first = time.perf_counter() - started
    for _ in range(WARMUP):
        work()
    times = []
    before = time.process_time()
    for _ in range(iterations):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    spent = time.process_time() - before
    return {
        "images_per_sec": batch / median(times),
        "images_per_processor_sec": batch * iterations / spent,
        "first_answer_sec": first,
        "peak_mb": (peak_memory_bytes() or 0) / 1e6,
    }


def computes_in(name: str, precision: str) -> bool:
    """Return whether a runtime computes in a precision on a CPU."""
    return name == NATIVE or precision in find_row(name).precisions.get("cpu", ())


def list_contenders() -> list[str]:
    """Return what is compared: the eager loop, and all runtimes in the precisions that this
    processor multiplies."""
    contenders = [EAGER]
    runtimes = list_installed("torch")
    for precision in ("fp32", "bf16"):
        if precision in arithmetic().precisions:
            contenders += [
                f"{name} {precision}" for name in runtimes if computes_in(name, precision)
            ]
    return contenders + [f"{name} int8" for name in runtimes if name in INT8_RUNS_IN]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--turn", nargs=3, metavar=("WHO", "STARTED", "INT8"), help="Run one turn in this process."
    )
    options = parser.parse_args()
    if options.turn:
        who, started, int8 = options.turn
        print(json.dumps(turn(who, options.batch, options.iterations, float(started), Path(int8))))
        return
    with tempfile.TemporaryDirectory() as folder:
        int8 = write_int8(Path(folder))
        turns = take_turns(list_contenders(), options.turns, str(int8))
    kind = "avx512" if "AVX-512" in arithmetic().extensions else "avx2"
    record(f"inference_runtimes_{kind}", summarise(turns, options.batch, options.turns))


def summarise(turns_by_name: Turns, batch: int, turns: int) -> dict[str, Any]:
    """Return what is recorded of all turns."""
    by: dict[str, dict[str, list[float]]] = {}
    for figure in ("images_per_sec", "images_per_processor_sec", "first_answer_sec", "peak_mb"):
        by[figure] = list_figures(turns_by_name, figure)
    over: dict[str, dict[str, float]] = {}
    for figure in ("images_per_sec", "images_per_processor_sec"):
        middles = {who: median(values) for who, values in by[figure].items()}
        eager = middles.pop(EAGER)
        over[figure] = {who: round(middle / eager, 3) for who, middle in middles.items()}
    best = 0.0
    int8 = 0.0
    for who, ratio in over["images_per_sec"].items():
        if who.endswith("int8"):
            int8 = max(int8, ratio)
        else:
            best = max(best, ratio)
    return {
        "what": (
            f"images a second, ResNet-50 inference, 224 px, batch {batch}; {turns} turns, one"
            " process each"
        ),
        **describe_load(),
        "threads": count_threads(),
        **by,
        "over_eager": over["images_per_sec"],
        "over_eager_by_processor_time": over["images_per_processor_sec"],
        "best_over_eager": best,
        "target": TARGETS["bf16" if "bf16" in arithmetic().precisions else "fp32"],
        "int8_over_best_of_others": round(int8 / best, 3),
        "int8_target": INT8_TARGET,
    }


if __name__ == "__main__":
    main()
