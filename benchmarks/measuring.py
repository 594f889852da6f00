"""Helpers for all benchmarks: a held batch, an engine at 224 px, alternating measurements, and the
result file."""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends import Engine, World
from lockstep.data import Batch
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.published import RECIPES
from lockstep.runs.environment import describe_environment
from lockstep.system.machine import arithmetic, cores

RESULTS = Path(__file__).parent / "results"
BATCH = 16
Turns = Mapping[str, Sequence[Mapping[str, float]]]
"""The figures of every turn, by contender."""


def make_parser(description: str | None, data: str = "") -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options; `data` describes its folder of images, if it
    needs one."""
    parser = argparse.ArgumentParser(description=description)
    if data:
        parser.add_argument("--data", type=Path, required=True, help=data)
    return parser


def recipe(**changes: Any) -> Recipe:
    """Return the Paddle recipe in bf16, with 16 images in a step and a low learning rate that keeps
    all values finite."""
    base = RECIPES["resnet50-paddle-90ep"]()
    return base.replace(
        **{"precision": "bf16", "global_batch_images": BATCH, "lr": 0.01, "lr_scaling": "none"}
        | changes
    )


def engine(recipe: Recipe, execution: Execution | None = None) -> tuple[Engine, World]:
    """Return an engine that holds the recipe's initial weights, and its world."""
    execution = execution or Execution()
    backend = backends.load(execution.backend)
    world = backend.world(execution)
    built = backend.engine(recipe, np.full(100_000, 0.001), world, execution)
    built.write(initial_state(recipe))
    return built, world


def random_tensors(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return random weights and statistics, scaled so that activations neither vanish nor grow."""
    random = np.random.default_rng(0)
    values = {}
    for tensor in recipe.list_tensors():
        drawn = random.standard_normal(tensor.shape, np.float32)
        if tensor.role in ("conv_weight", "fc_weight"):
            drawn *= np.float32(math.sqrt(2 / math.prod(tensor.shape[1:])))
        elif tensor.role in ("bn_scale", "bn_var"):
            drawn = np.exp(np.float32(0.2) * drawn)
        values[tensor.name] = drawn
    return values


def make_batch(size: int = 224, images: int = BATCH) -> Batch:
    """Return a batch of random pixels and labels."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (images, size, size, 3), dtype=np.uint8)
    return Batch(pixels, random.integers(0, 1000, images))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(
    first: Callable[[], float], second: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Take two measurements alternately, `rounds` times each, and return both lists of values."""
    of_first = []
    of_second = []
    for _ in range(rounds):
        of_first.append(first())
        of_second.append(second())
    return of_first, of_second


def take_turns(contenders: Sequence[str], turns: int, *more: str) -> Turns:
    """Run this program once for every turn, with `--turn CONTENDER MORE`; its last line is JSON.

    The contenders alternate, so that other work on the machine affects all of them.
    """
    figures: dict[str, list[Mapping[str, float]]] = {who: [] for who in contenders}
    for _ in range(turns):
        for who in contenders:
            started = str(time.perf_counter())
            command = [sys.executable, *sys.argv, "--turn", who, started, *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures[who].append(json.loads(done.stdout.splitlines()[-1]))
    return figures


def list_figures(turns: Turns, figure: str) -> dict[str, list[float]]:
    """Return a figure of all turns, rounded, by contender."""
    return {who: round_all([turn[figure] for turn in own]) for who, own in turns.items()}


def describe_load() -> dict[str, Any]:
    """Return the processor, and whether other programs are running."""
    return {
        "processor": f"{', '.join(arithmetic().extensions)}; limit: {arithmetic().limit}",
        "load_average": os.getloadavg()[0],
        "idle_machine": os.getloadavg()[0] < cores() + 1,
    }


def record(name: str, result: dict[str, Any], backend: str = "torch") -> None:
    """Print a result and write it to `results/<name>.json`."""
    for key, value in result.items():
        print(f"{key:<32} {value}")
    command = ["python", *name_program(Path(sys.argv[0])), *sys.argv[1:]]
    shown_paths = (("--data", "DIR"), ("--runs", "RUNS"), ("--weights", "FILE"))
    others = (("--baseline", "OLD/src"), ("--contenders-python", "VENV/bin/python"))
    for option, shown in (*shown_paths, *others, ("--peers", "PEERS")):
        if option in command:
            command[command.index(option) + 1] = shown  # the path means nothing on other machines
    about = {"command": shlex.join(command), "environment": describe_environment(backend)}
    (RESULTS / f"{name}.json").write_text(json.dumps(result | about, indent=1) + "\n")


def name_program(path: Path) -> list[str]:
    """Return how a program of this folder is started, after `python`."""
    if path.name == "__main__.py":
        return ["-m", f"benchmarks.{path.parent.name}"]
    return [f"benchmarks/{path.name}"]


def round_all(values: list[float]) -> list[float]:
    """Return the values rounded to four decimal places."""
    return [round(value, 4) for value in values]


median = statistics.median
