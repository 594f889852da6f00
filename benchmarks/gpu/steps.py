"""Training steps of Lockstep's engine: the time of the host, the memory, and a trace. Also what the
modules of this folder share."""

import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import HOW
from lockstep import backends
from lockstep.backends.torch.tracing import profile
from lockstep.data import Batch
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.strict_json import to_json

REPEATS = 10
STEPS = 5
KERNELS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of the events of a trace that occupy a device."""
GAP_US = 5.0
"""Between two kernels that were enqueued in time, less than this passes."""
Rows = Iterator[Mapping[str, Any]]


def print_rows(measure: Callable[..., Rows]) -> None:
    """Measure with the settings of the command line, such as batch=4. Print a row at once, so that
    it outlives the process."""
    settings: dict[str, Any] = {}
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        settings[name] = int(value) if value.isdigit() else value
    for row in measure(**settings):
        print(to_json(dict(row)), flush=True)


def make_recipe(model: str, precision: str, batch: int, *, tiny: bool) -> Recipe:
    """Return NVIDIA's recipe with another model and precision; if tiny, narrow and with small
    images."""
    scaling = {"fp16": "static", "fp16 dynamic": "dynamic"}.get(precision, "none")
    fields: dict[str, Any] = {"model": model, "global_batch_images": batch}
    fields |= {"precision": precision.split()[0], "loss_scaling": scaling}
    if tiny:
        fields |= {"model": narrow_model(MODELS[model]), "logits": 10}
        fields |= {"image_size": 32, "eval_crop": 32, "eval_resize": 36}
    return load_recipe("resnet50-paddle-90ep").replace(**fields)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_ms(call: Callable[[], object], device: str, repeats: int, warmup: int = 3) -> float:
    """Return the median milliseconds of a call, until the device is done."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


class Lockstep:
    """Lockstep's engine on a held batch of noise."""

    def __init__(self, recipe: Recipe, device: str, contender: str, compile: str) -> None:
        fields = {"backend": "torch", "device": device, "compile": compile} | HOW[contender]
        execution = Execution.of(fields)
        backend = backends.load("torch")
        world = backend.world(execution)
        self.engine = backend.engine(recipe, np.full(10_000, 1e-3), world, execution)
        self.engine.write(initial_state(recipe))
        random = np.random.default_rng(0)
        images = recipe.global_batch_images
        shape = (images, recipe.image_size, recipe.image_size, 3)
        pixels = random.integers(0, 256, shape, dtype=np.uint8)
        self._batch = Batch(pixels, random.integers(0, recipe.logits, images), is_held=True)
        self._step = 0

    def begin(self, steps: int) -> Any:
        """Take steps; return what `fetch` takes when `train` returns."""
        handle = self.engine.train(repeat(self._batch, steps), self._step)
        self._step += steps
        return handle

    def run(self, steps: int) -> None:
        """Take steps and fetch their sums."""
        self.engine.fetch(self.begin(steps))


def measure(
    device: str, model: str, precision: str, batch: int, contender: str, trace: str, tiny: int = 0
) -> Rows:
    """Yield how long `train` keeps the host for a step and the memory of the device, then the
    figures of a trace, which is kept in a file if it has a name.

    The device is idle when `train` is called, so the queue of the driver is empty and does not hold
    the host.
    """
    recipe = make_recipe(model, precision, batch, tiny=bool(tiny))
    lockstep = Lockstep(recipe, device, contender, "off" if tiny else "auto")
    lockstep.run(8)
    single = []
    for _ in range(REPEATS):
        wait(device)
        began = time.perf_counter()
        handle = lockstep.begin(1)
        single.append(time.perf_counter() - began)
        lockstep.engine.fetch(handle)
    wait(device)
    began = time.perf_counter()
    handle = lockstep.begin(STEPS)
    returned = time.perf_counter() - began
    lockstep.engine.fetch(handle)
    done = time.perf_counter() - began
    same = {"contender": contender, "model": model, "precision": precision, "batch": batch}
    row = {"what": "host", "host_ms_a_step": 1000 * statistics.median(single)} | same
    row |= {"returned_sec": returned, "done_sec": done}
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    yield row
    yield {"what": "profile"} | same | trace_steps(lockstep.run, device, trace)


def trace_steps(run: Callable[[int], None], device: str, file: str) -> dict[str, Any]:
    """Return the figures of a trace of some steps."""
    wait(device)
    with tempfile.TemporaryDirectory() as folder:
        with profile(Path(folder)):
            run(STEPS)
        text = (Path(folder) / "trace.json").read_bytes()
    if file:
        Path(file).write_bytes(gzip.compress(text))
    return summarise_trace(json.loads(text)["traceEvents"], KERNELS[device], STEPS)


def summarise_trace(
    events: Iterable[Mapping[str, Any]], categories: tuple[str, ...], steps: int
) -> dict[str, Any]:
    """Return figures of the events of some categories in a trace. Times in a trace are in
    microseconds.

    - `span_ms`: from the first event to the end of the last, for one step.
    - `busy_share`: the share of the span in which at least one of them runs.
    - `gaps`: how many times nothing runs for more than `GAP_US`, in one step.
    - `longest`: the ten names that take the longest together, and their milliseconds in a step.
    """
    kernels = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            kernels += [(float(event["ts"]), float(event.get("dur", 0)), str(event["name"]))]
    kernels.sort()
    begin = kernels[0][0]
    end = begin
    busy = 0.0
    gaps = []
    sums: dict[str, float] = {}
    for start, duration, name in kernels:
        gaps.append(start - end)
        busy += max(start + duration - max(start, end), 0.0)
        end = max(end, start + duration)
        sums[name] = sums.get(name, 0.0) + duration / 1000 / steps
    return {
        "span_ms": (end - begin) / 1000 / steps,
        "busy_share": busy / (end - begin),
        "gaps": sum(gap > GAP_US for gap in gaps) / steps,
        "longest_gap_us": max(gaps),
        "longest": sorted(sums.items(), key=lambda item: -item[1])[:10],
    }


if __name__ == "__main__":
    print_rows(measure)
