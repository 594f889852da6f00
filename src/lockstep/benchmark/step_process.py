"""The process that tries one training step (see `lockstep.benchmark.largest_batch`, which starts
it).

Its folder holds `task.json`. It writes `result.json` or `failure.json` into it.
"""

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.benchmark.failures import describe_error
from lockstep.data import Batch
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.order import keep_blocks, keep_features
from lockstep.system.files import write_json
from lockstep.system.machine import peak_memory_bytes
from lockstep.system.workers import end_with_parent

TASK = "task.json"
RESULT = "result.json"
FAILURE = "failure.json"
_STEPS = 2
_STEPS_ON_A_GPU = 5
"""Steps of a try. With a CUDA graph the first three are taken as they are, and the fourth is
captured."""
_RATE = 0.001
"""Learning rate of every step. It is small, so that no weight becomes infinite."""


def save_task(folder: Path, recipe: Recipe, execution: Execution, memory_bytes: int | None) -> None:
    """Write what the process tries. `memory_bytes` is what it may allocate on a CPU; None: there is
    no limit."""
    task = {
        "recipe": recipe.fields(),
        "execution": execution.fields(),
        "memory_bytes": memory_bytes,
    }
    write_json(folder / TASK, task)


def work(folder: Path) -> int:
    """Take the steps that the folder describes, and return the exit code."""
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    end_with_parent()
    try:
        execution = Execution.of(task["execution"])
        result = measure_steps(Recipe.of(task["recipe"]), execution, task["memory_bytes"])
    except Exception as error:
        write_json(folder / FAILURE, describe_error(error))
        return 1
    write_json(folder / RESULT, result)
    return 0


def limit_memory(most_bytes: int) -> None:
    """Let this process allocate at most this many bytes.

    The limit is RLIMIT_DATA: what the process may write to and shares with no other. Code of
    libraries does not count.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most_bytes if hard < 0 else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def measure_steps(recipe: Recipe, execution: Execution, memory_bytes: int | None) -> dict[str, Any]:
    """Train steps on noise, all enqueued before the first is fetched. Return the last one's speed,
    memory and device.

    On a CPU the process may then allocate at most `memory_bytes`. On a GPU the GPU's own memory is
    the limit.
    """
    backend = backends.load(execution.backend)
    world = backend.world(execution)
    if memory_bytes is not None and not world.on_gpu:
        limit_memory(memory_bytes)
    steps = _STEPS_ON_A_GPU if world.on_gpu else _STEPS
    try:
        with backend.engine(recipe, np.full(steps, _RATE), world, execution) as engine:
            engine.write(initial_state(recipe))
            batches = noise(recipe, execution.accumulation_steps)
            began = time.perf_counter()
            enqueued = [engine.train([next(batches)], step) for step in range(steps)]
            ends = [engine.fetch(handle).finished_at for handle in enqueued]
    finally:
        world.close()
    seconds = ends[-1] - max(began, ends[-2])
    return {
        "images_per_sec": recipe.global_batch_images / seconds if seconds > 0 else None,
        "peak_memory_bytes": peak_memory_bytes(),
        "device": world.device,
    }


def noise(recipe: Recipe, parts: int) -> Iterator[Batch]:
    """Yield batches of noise, with the recipe's MixUp, CutMix, dropout and stochastic depth."""
    images = recipe.global_batch_images
    positions = np.arange(images)
    columns = _mix_halves(recipe, parts) | {
        "kept_features": keep_features(recipe, 0, positions),
        "kept_blocks": keep_blocks(recipe, 0, positions),
    }
    random = np.random.default_rng(0)
    while True:
        pixels = random.integers(
            0, 256, (images, recipe.image_size, recipe.image_size, 3), dtype=np.uint8
        )
        labels = random.integers(0, recipe.logits, images)
        yield Batch(pixels, labels, **columns)


def _mix_halves(recipe: Recipe, parts: int) -> dict[str, Any]:
    """Return the columns of a batch of which all images are mixed, if the recipe mixes images."""
    if not recipe.mixes_images:
        return {}
    images = recipe.global_batch_images
    halves = np.full(images, 0.5, np.float32)
    columns: dict[str, Any] = {
        "coefficients": halves,
        "partners": np.arange(images) % (images // parts),
    }
    if recipe.cutmix_alpha:
        columns["target_coefficients"] = halves
        columns["boxes"] = np.full((images, 4), recipe.image_size // 2, np.int32)
    return columns
