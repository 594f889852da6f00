"""Lockstep's engine as the parts use it."""

import time
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from benchmarks.gpu.switches import Switches
from benchmarks.gpu.timing import Ground
from lockstep import backends
from lockstep.backends import Engine, Interval
from lockstep.backends.torch.inputs import PINNED
from lockstep.data import Batch
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.recipes.initial_weights import initial_state

RATE = 1e-3
MOST_STEPS = 100_000
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "loss_scaling": "none"},
    "tf32": {"precision": "tf32", "loss_scaling": "none"},
    "bf16": {"precision": "bf16", "loss_scaling": "none"},
    "fp16": {"precision": "fp16", "loss_scaling": "static"},
    "fp16 dynamic": {"precision": "fp16", "loss_scaling": "dynamic"},
}
"""Fields of a recipe, by precision. NVIDIA's recipes for Paddle scale the loss statically in fp16.
"""
TINY_SIZE = 32
TINY_BATCH = 4


def recipe_of(ground: Ground, model: str, precision: str, batch: int, **changes: Any) -> Recipe:
    """Return NVIDIA's recipe with another model and precision; if the ground is tiny, narrow and
    with small images."""
    base = load_recipe("resnet50-paddle-90ep")
    fields = {"model": model, "global_batch_images": batch} | PRECISIONS[precision]
    if ground.tiny:
        small = {
            "model": narrow_model(MODELS[model]),
            "image_size": TINY_SIZE,
            "eval_crop": TINY_SIZE,
            "eval_resize": 36,
        }
        fields |= small | {"global_batch_images": TINY_BATCH, "logits": 10}
    return base.replace(**(fields | changes))


def held_batch(recipe: Recipe, seed: int = 0, images: int = 0) -> Batch:
    """Return a batch of noise that the engine keeps on its device."""
    random = np.random.default_rng(seed)
    size = recipe.image_size
    count = images or recipe.global_batch_images
    pixels = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return Batch(pixels, random.integers(0, recipe.logits, count), is_held=True)


def open_engine(recipe: Recipe, device: str, **how: Any) -> Engine:
    """Return Lockstep's engine with the recipe's initial weights."""
    execution = Execution.of({"backend": "torch", "device": device} | how)
    backend = backends.load("torch")
    engine = backend.engine(recipe, np.full(MOST_STEPS, RATE), backend.world(execution), execution)
    engine.write(initial_state(recipe))
    return engine


class Lockstep:
    """Lockstep's engine as a contender."""

    def __init__(self, recipe: Recipe, ground: Ground, *, name: str, **how: Any) -> None:
        self.recipe = recipe
        self._ground = ground
        self.name = name
        self.images = recipe.global_batch_images
        self.engine = open_engine(recipe, ground.device, **how)
        self.batch = held_batch(recipe)
        self._switches = Switches.now()
        self.step = 0

    def prepare(self) -> None:
        """Set the process's switches as the engine set them when it was built."""
        self._switches.set()

    def run(self, steps: int) -> None:
        """Take steps on the held batch and fetch their sums."""
        self.train(steps)

    def train(self, steps: int) -> Interval:
        """Take steps on the held batch and return their results."""
        handle = self.engine.train(repeat(self.batch, steps), self.step)
        self.step += steps
        return self.engine.fetch(handle)

    def host_times(self, repeats: int, steps: int) -> dict[str, Any]:
        """Return how long `train` keeps the host: milliseconds for one step, and its share of the
        time of several.

        The device is idle when `train` is called, so the queue of the driver is empty and does not
        hold the host. For new batches the time includes waiting for the thread that copies them
        into pinned memory; the processor's time does not.
        """
        self.prepare()
        single = []
        for _ in range(repeats):
            self._ground.wait()
            began = time.perf_counter()
            handle = self.engine.train([self.batch], self.step)
            single.append(time.perf_counter() - began)
            self.step += 1
            self.engine.fetch(handle)
        wall, own = zip(*(self._new_batches() for _ in range(repeats)), strict=True)
        self._ground.wait()
        began = time.perf_counter()
        handle = self.engine.train(repeat(self.batch, steps), self.step)
        returned = time.perf_counter() - began
        self.step += steps
        self.engine.fetch(handle)
        done = time.perf_counter() - began
        return {
            "host_ms_a_step": 1000 * float(np.median(single)),
            "host_ms_a_new_batch": 1000 * float(np.median(wall)),
            "processor_ms_a_new_batch": 1000 * float(np.median(own)),
            "returned_sec": returned,
            "done_sec": done,
            "steps": steps,
        }

    def _new_batches(self) -> tuple[float, float]:
        """Return how long `train` keeps the host for each of some new batches, and its processor,
        in seconds."""
        self._ground.wait()
        began = time.perf_counter()
        own = time.thread_time()
        handle = self.engine.train(repeat(replace(self.batch, is_held=False), PINNED), self.step)
        times = (time.perf_counter() - began) / PINNED, (time.thread_time() - own) / PINNED
        self.step += PINNED
        self.engine.fetch(handle)
        return times
