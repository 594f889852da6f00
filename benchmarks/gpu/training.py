"""Training steps: the rates of contenders, which alternate in one process so that a drift of clock
or heat reaches all of them; and traces."""

import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contenders import Contender, Lockstep, build_contenders, select_kernels
from benchmarks.gpu.rows import Rows, make_recipe, measure_ms, print_rows, wait
from lockstep.backends.torch.tracing import profile

MODES = {
    "default": ("plain", "deterministic", "fused", "eager", "compile"),
    "max-autotune": ("plain", "max-autotune"),
    "reduce-overhead": ("plain", "graph", "reduce-overhead"),
    "tiny": ("plain", "deterministic", "eager", "traced"),
}
"""Engines of Lockstep (`HOW`) and kinds of networks that are compared. Captured steps keep their
memory, so few are compared in their mode."""
ROUNDS = 5
TURN_MS = 1000.0
STEPS = 5
"""Steps of a trace."""
KERNELS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of the events of a trace that occupy a device."""
GAP_US = 5.0
"""Between two kernels that were enqueued in time, less than this passes."""


def measure_rates(device: str, model: str, precision: str, batch: int, mode: str) -> Rows:
    """Yield images per second of every contender: the mean, and that of every round. An error while
    contenders are built ends only those that share a network."""
    is_tiny = mode == "tiny"
    recipe = make_recipe(model, precision, batch, tiny=is_tiny)
    same = {"what": "train", "model": model, "precision": precision, "batch": batch, "mode": mode}
    contenders: dict[str, Contender] = {}
    for kind in MODES[mode]:
        try:
            contenders |= build_contenders(recipe, device, kind)
        except Exception as error:  # too little memory, or a compiler's own errors
            reason = f"{type(error).__name__}: {error!s:.600}"
            yield same | {"contender": kind, "status": "failed", "reason": reason}
    if not contenders:
        raise RuntimeError("no contender could be built; the rows say why")
    times = alternate(contenders, device, *((2, 0.0) if is_tiny else (ROUNDS, TURN_MS)))
    for name, milliseconds in times.items():
        rates = [1000 * batch / ms for ms in milliseconds]
        row = {"contender": name, "status": "ok", "images_per_sec": sum(rates) / len(rates)}
        yield same | row | {"rounds": rates}


def alternate(
    contenders: Mapping[str, Contender], device: str, rounds: int, turn_ms: float
) -> dict[str, list[float]]:
    """Return the milliseconds of a step of every contender in every round. A turn takes about
    `turn_ms`, and at least two steps. Each round begins with another contender."""
    steps = {}
    for name, contender in contenders.items():
        steps[name] = max(round(turn_ms / _take_turn(contender, device, 2)), 2)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            times[name].append(_take_turn(contenders[name], device, steps[name]))
        order.append(order.pop(0))
    return times


def _take_turn(contender: Contender, device: str, steps: int) -> float:
    """Return the milliseconds of a step. One before the turn is not counted."""
    select_kernels(contender, device)
    contender.run(1)
    return measure_ms(partial(contender.run, steps), device) / steps


def measure_profile(
    device: str, model: str, precision: str, batch: int, kind: str, trace: str = "", tiny: int = 0
) -> Rows:
    """Yield the time of the host and the memory, and the figures of a trace, which is kept in a
    file if it has a name. Of the loops of a network, the last one is traced."""
    recipe = make_recipe(model, precision, batch, tiny=bool(tiny))
    name, contender = build_contenders(recipe, device, kind).popitem()
    contender.run(4)
    wait(device)
    same = {"contender": name, "model": model, "precision": precision, "batch": batch}
    if isinstance(contender, Lockstep):
        yield {"what": "host"} | same | _measure_host(contender, device)
    with tempfile.TemporaryDirectory() as folder:
        with profile(Path(folder)):
            contender.run(STEPS)
        text = (Path(folder) / "trace.json").read_bytes()
    if trace:
        Path(trace).write_bytes(gzip.compress(text))
    figures = summarise_trace(json.loads(text)["traceEvents"], KERNELS[device], STEPS)
    yield {"what": "profile"} | same | figures


def _measure_host(lockstep: Lockstep, device: str) -> dict[str, float]:
    """Return how long `train` keeps the host for a step, and for several; and the memory. The
    device is idle before, so the queue of the driver is empty and does not hold the host."""

    def time_steps(steps: int) -> tuple[float, float]:
        wait(device)
        began = time.perf_counter()
        handle = lockstep.begin(steps)
        returned = time.perf_counter() - began
        lockstep.engine.fetch(handle)
        return returned, time.perf_counter() - began

    median = statistics.median(time_steps(1)[0] for _ in range(10))
    returned, done = time_steps(STEPS)
    row = {"host_ms_a_step": 1000 * median, "returned_sec": returned, "done_sec": done}
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return row


def summarise_trace(
    events: Iterable[Mapping[str, Any]], categories: tuple[str, ...], steps: int
) -> dict[str, Any]:
    """Return figures of a step from the events of some categories in a trace, which has
    microseconds: from the first event to the end of the last, the share of it in which one runs,
    how often none runs for more than `GAP_US`, and the ten names that take the longest."""
    kernels = [event for event in events if event.get("cat") in categories and "dur" in event]
    kernels.sort(key=lambda event: event["ts"])
    begin = kernels[0]["ts"]
    end = begin
    gaps = []
    long_gaps = 0
    sums: dict[str, float] = {}
    for kernel in kernels:
        gaps.append(max(kernel["ts"] - end, 0.0))
        long_gaps += gaps[-1] > GAP_US
        end = max(end, kernel["ts"] + kernel["dur"])
        sums[kernel["name"]] = sums.get(kernel["name"], 0.0) + kernel["dur"] / 1000 / steps
    return {
        "span_ms": (end - begin) / 1000 / steps,
        "busy_share": 1 - sum(gaps) / (end - begin),
        "gaps": long_gaps / steps,
        "longest_gap_us": max(gaps),
        "longest": sorted(sums.items(), key=lambda item: -item[1])[:10],
    }


def measure(what: str, **settings: Any) -> Rows:
    """Yield rows about "rates" or a "profile"."""
    return measure_rates(**settings) if what == "rates" else measure_profile(**settings)


if __name__ == "__main__":
    print_rows(measure)
