"""Part: a trace of some training steps: how long the device is idle, and its longest kernels."""

import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.baselines import Loop, Network
from benchmarks.gpu.engines import Lockstep, recipe_of
from benchmarks.gpu.parts import GRAPH, PLAIN
from benchmarks.gpu.timing import Contender, Ground, Say
from lockstep.backends.torch.tracing import profile

KERNELS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of the events of a trace that occupy a device."""
GAP_US = 5.0
"""Between two kernels that were enqueued in time, less than this passes."""
LONGEST = 10


def measure(
    ground: Ground, say: Say, model: str = "resnet50", precisions: Sequence[str] = ("bf16",)
) -> None:
    """Write a row for the engine, its captured step and the compiled loop, and the engine's trace."""
    batch = 256 if model == "resnet50" else 128
    steps = 1 if ground.tiny else 5
    for precision in precisions:
        recipe = recipe_of(ground, model, precision, batch)
        same = {
            "what": "profile",
            "model": model,
            "precision": precision,
            "batch": recipe.global_batch_images,
            "steps": steps,
        }
        engine = Lockstep(recipe, ground, name=PLAIN, deterministic=False)
        say(
            same
            | {"contender": engine.name}
            | _traced(engine, ground, steps, f"trace-{model}-{precision}.json.gz")
        )
        if ground.device == "cuda":
            graph = Lockstep(recipe, ground, name=GRAPH, deterministic=False, cuda_graph="on")
            say(same | {"contender": graph.name} | _traced(graph, ground, steps))
        if not ground.tiny:
            loop = Loop(
                Network(recipe, recipe.global_batch_images, ground.device, "compile"), "fused SGD"
            )
            say(same | {"contender": loop.name} | _traced(loop, ground, steps))


def _traced(contender: Contender, ground: Ground, steps: int, keep: str = "") -> dict[str, Any]:
    """Return the figures of the trace of some steps after others. `keep` is the name of the file
    that keeps the trace."""
    contender.prepare()
    contender.run(1 if ground.tiny else 8)
    ground.wait()
    with tempfile.TemporaryDirectory() as folder:
        with profile(Path(folder)):
            contender.run(steps)
        text = (Path(folder) / "trace.json").read_bytes()
    if keep and not ground.tiny:
        (Path(ground.out) / keep).write_bytes(gzip.compress(text))
    return figures(json.loads(text)["traceEvents"], KERNELS[ground.device], steps)


def figures(
    events: Iterable[Mapping[str, Any]], categories: tuple[str, ...], steps: int
) -> dict[str, Any]:
    """Return figures of the events of some categories in a trace. Times in a trace are in
    microseconds.

    - `span_ms`: from the first event to the end of the last, for one step.
    - `busy_share`: the share of the span in which at least one of them runs.
    - `gaps`: how many times nothing runs for more than `GAP_US`, in one step, and how long the
      longest gap is.
    - `longest`: the names that take the longest together, with their share of the sum over all, and
      their calls in a step.
    """
    found = sorted(
        (float(event["ts"]), float(event.get("dur", 0)), str(event["name"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in categories
    )
    if not found:
        return {"events": 0}
    begin = end = found[0][0]
    busy = 0.0
    gaps = []
    for ts, duration, _ in found:
        if ts > end:
            gaps.append(ts - end)
        busy += max(ts + duration - max(ts, end), 0.0)
        end = max(end, ts + duration)
    span = end - begin
    by_name: dict[str, list[float]] = {}
    for _, duration, name in found:
        by_name.setdefault(name, []).append(duration)
    total = sum(map(sum, by_name.values())) or 1.0
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "events": len(found),
        "span_ms": span / 1000 / steps,
        "busy_share": busy / span if span else 1.0,
        "gaps": sum(gap > GAP_US for gap in gaps) / steps,
        "longest_gap_us": max(gaps, default=0.0),
        "longest": [
            {
                "name": name[:160],
                "ms": sum(each) / 1000 / steps,
                "share": sum(each) / total,
                "calls": len(each) / steps,
            }
            for name, each in ordered[:LONGEST]
        ],
    }
