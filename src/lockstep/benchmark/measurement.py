"""Measure one rank's part of a cell: when each iteration ends. Only the engine protocol is used.

Training is measured as `lockstep.train` runs it: the next step is enqueued before the previous one
is fetched, so the device never waits for the host to read a loss. Every step is a separate
interval, so that its end is known.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends import Engine, Handle, HostQuestions, World
from lockstep.benchmark import ceilings
from lockstep.benchmark.cells import SYNTHETIC, TRAIN, Cell, Plan
from lockstep.benchmark.contention import ProcessorTime
from lockstep.data import Batch
from lockstep.data.index import Index, open_index
from lockstep.data.loading.loaders import make_loader
from lockstep.data.sources import find_source, find_split, holds_split
from lockstep.inference.runtimes import NATIVE, choose_device, describe_cpu, open_runtime
from lockstep.inference.runtimes.exported import ExportedModel
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.limits import MOST_EPOCHS
from lockstep.recipes.order import (
    BatchPlan,
    centre_plan,
    keep_blocks,
    keep_features,
    training_plans,
)
from lockstep.system.errors import DataError
from lockstep.system.machine import peak_memory_bytes
from lockstep.weights import LOCKSTEP, Weights

LEARNING_RATE = 0.001
"""Learning rate of every step. It is small, so that no weight becomes infinite."""
CEILING_ITERATIONS = 50
"""At most this many iterations are measured for each ceiling: compute-only and loader-only."""
CEILING_WARMUP = 2
"""Warm-up iterations before each ceiling."""

TELL_SEC = 0.2
"""At least this many seconds pass between two reports of progress."""


@dataclass(frozen=True)
class Timeline:
    """When iterations ended, by `time.perf_counter`, which is the same clock for all processes of a
    machine."""

    began: float
    ends: list[float]
    waited_sec: list[float]
    """How long every iteration waited for its batch."""


@dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    device: str
    on_gpu: bool
    warmup: Timeline
    counted: Timeline
    compute_only: Timeline | None
    """Iterations on one repeated batch; None if the data is such a batch already."""
    loader_only: Timeline | None
    """Batches that are loaded and not used; None without a loader."""
    gemm_gflops: float | None
    copy_gb_per_sec: float | None
    processors: ProcessorTime
    """Processor time that passed during the measured iterations."""
    machine_cores: int
    remarks: list[str]
    peak_memory_bytes: int | None
    """The most main memory that the process had used when the measured iterations ended; None if it
    is not known."""

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


Tell = Callable[[int, int], None]


def measure(
    cell: Cell,
    plan: Plan,
    recipe: Recipe,
    execution: Execution,
    tell: Tell,
    exported: bytes | None = None,
) -> Measured:
    """Measure a cell on this rank. Every rank must call this. `tell` gets the number of iterations
    done, and the total.

    `exported` is the ONNX model that a runtime that is not native runs; None: it makes one of
    the initial weights.
    """
    world = _open_world(cell, execution)
    counted = plan.iterations * plan.epochs
    warmup = plan.iterations * plan.warmup_epochs
    ceiling = 0 if cell.data == SYNTHETIC else min(counted, CEILING_ITERATIONS) + CEILING_WARMUP
    total = warmup + counted + 2 * ceiling
    progress = _Progress(tell, total)
    try:
        source = _Source(cell, plan, recipe, execution, world)
        with _open_engine(cell, recipe, execution, world, total, exported) as engine:
            run = _Runner(engine, cell.what == TRAIN, progress)
            with source.batches() as batches:
                before = run(batches, warmup)
                world.wait()  # all ranks start together
                start = ProcessorTime.now()
                during = run(batches, counted)
                processors = ProcessorTime.now().since(start)
            memory = peak_memory_bytes()
            computing = loading = None
            if ceiling:
                batches = repeat(source.make_noise())
                run(batches, CEILING_WARMUP)
                world.wait()
                computing = run(batches, ceiling - CEILING_WARMUP)
        if ceiling:
            with source.batches() as batches:
                _drain(batches, CEILING_WARMUP, progress)
                world.wait()
                loading = _drain(batches, ceiling - CEILING_WARMUP, progress)
        gemm, copy, remarks = _measure_ceilings(cell, world)
        return Measured(
            device=world.device,
            on_gpu=world.on_gpu,
            warmup=before,
            counted=during,
            compute_only=computing,
            loader_only=loading,
            gemm_gflops=gemm,
            copy_gb_per_sec=copy,
            processors=processors,
            machine_cores=os.cpu_count() or 1,
            remarks=remarks,
            peak_memory_bytes=memory,
        )
    finally:
        world.close()


def _open_world(cell: Cell, execution: Execution) -> World:
    if cell.runtime != NATIVE:
        return Alone(cell.runtime, execution)
    return backends.load(cell.backend).world(execution)


class Alone(HostQuestions):
    """The world of a runtime that is not native: this process."""

    rank = 0
    ranks = 1

    def __init__(self, runtime: str, execution: Execution) -> None:
        self.on_gpu = choose_device(runtime, execution) == "cuda"
        self.device = "GPU" if self.on_gpu else describe_cpu()

    def _largest(self, values: list[int]) -> list[int]:
        return values

    def close(self) -> None:
        """Do nothing: there is no process group."""


@contextmanager
def _open_engine(
    cell: Cell,
    recipe: Recipe,
    execution: Execution,
    world: World,
    steps: int,
    exported: bytes | None,
) -> Iterator[Any]:
    """Yield the engine of a cell, with the recipe's initial weights. Native ones are prepared for
    this many steps."""
    state = initial_state(recipe)
    if cell.runtime != NATIVE:
        weights = Weights(recipe, state, (), Path("initial weights"), LOCKSTEP)
        model = None if exported is None else ExportedModel(weights, exported, {})
        with open_runtime(
            cell.runtime, weights, execution, most_images=cell.batch, exported=model
        ) as runtime:
            yield runtime
        return
    # The engine takes the measured steps as an epoch, and compiles if that pays in an epoch.
    epoch = recipe.replace(epochs=1, warmup_epochs=0)
    rates = np.full(steps, LEARNING_RATE)
    with backends.load(cell.backend).engine(epoch, rates, world, execution) as engine:
        engine.write(state)
        yield engine


def _measure_ceilings(cell: Cell, world: World) -> tuple[float | None, float | None, list[str]]:
    """Return the rates of matrix products and copies, and remarks on those that are unknown.

    A runtime that is not native has no products to measure, and hence no limit.
    """
    world.wait()
    if cell.runtime != NATIVE:
        return None, None, []
    place: dict[str, Any] = {"on_gpu": world.on_gpu, "ranks": world.ranks}
    gemm, no_product = _try_rate(partial(ceilings.gemm_gflops, cell.backend, cell.dtype, **place))
    world.wait()  # ranks share the memory, so all of them copy at the same time
    copy, no_copy = _try_rate(partial(ceilings.copy_gb_per_sec, cell.backend, **place))
    remarks = []
    for name, reason in ((f"matrix product in {cell.dtype}", no_product), ("copy", no_copy)):
        if reason:
            remarks.append(f"{cell.backend} has no {name} here, so no limit is known: {reason}")
    return gemm, copy, remarks


class _Progress:
    """Counts iterations, and reports progress so rarely that it does not slow them down."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell = tell
        self._total = total
        self._done = 0
        self._told_at = 0.0

    def advance(self) -> None:
        self._done += 1
        now = time.perf_counter()
        if now - self._told_at > TELL_SEC or self._done == self._total:
            self._told_at = now
            self._tell(self._done, self._total)


class _Runner:
    """Runs iterations of training or of inference, numbered from 0."""

    def __init__(self, engine: Engine, trains: bool, progress: _Progress) -> None:
        self._engine = engine
        self._trains = trains
        self._progress = progress
        self._step = 0

    def __call__(self, batches: Iterator[Batch], steps: int) -> Timeline:
        """Run iterations. A training step is fetched after the next one is enqueued; a prediction
        is done at once."""
        ends = []
        waited = []
        enqueued: Handle | None = None
        began = time.perf_counter()
        for _ in range(steps):
            start = time.perf_counter()
            batch = next(batches)
            waited.append(time.perf_counter() - start)
            if self._trains:
                handle = self._engine.train([batch], self._step)
                if enqueued is not None:
                    ends.append(self._engine.fetch(enqueued).finished_at)
                enqueued = handle
            else:
                self._engine.predict(batch.pixels)
                ends.append(time.perf_counter())
            self._step += 1
            self._progress.advance()
        if enqueued is not None:
            ends.append(self._engine.fetch(enqueued).finished_at)
        return Timeline(began, ends, waited)


def _drain(batches: Iterator[Batch], steps: int, progress: _Progress) -> Timeline:
    ends = []
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
        ends.append(time.perf_counter())
        progress.advance()
    return Timeline(began, ends, [0.0] * steps)


def _try_rate(measure: Callable[[], float]) -> tuple[float | None, str]:
    """Return a rate, or why there is none. The cell is still valid: its figures do not need a
    rate."""
    try:
        return measure(), ""
    except Exception as error:  # frameworks raise different ones for what they do not have
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, f"{reason:.200}"


class _Source:
    """The source of a rank's batches."""

    def __init__(
        self, cell: Cell, plan: Plan, recipe: Recipe, execution: Execution, world: World
    ) -> None:
        self._cell = cell
        self._recipe = recipe
        self._execution = execution
        self._world = world
        self._size = recipe.image_size if cell.what == TRAIN else recipe.eval_crop
        self._images = None if cell.data == SYNTHETIC else open_data(cell, plan, recipe)

    def make_noise(self) -> Batch:
        """Return a batch of noise that an engine may keep on its device."""
        random = np.random.default_rng(0)
        images = self._cell.batch
        noise = random.integers(0, 256, (images, self._size, self._size, 3), dtype=np.uint8)
        labels = random.integers(0, self._recipe.logits, images)
        positions = np.arange(images)
        return Batch(
            noise,
            labels,
            kept_features=keep_features(self._recipe, 0, positions),
            kept_blocks=keep_blocks(self._recipe, 0, positions),
            is_held=True,
        )

    @contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """Yield an iterator of batches that never ends."""
        if self._images is None:
            yield repeat(self.make_noise())
            return
        index, chosen = self._images
        evaluates = self._cell.what != TRAIN
        with make_loader(index, self._recipe, self._execution, evaluation=evaluates) as loader:
            shards = None if index.shards is None else index.shards[chosen]
            sizes = index.sizes_for(self._recipe)[chosen]
            plans = self._plan(sizes, index.labels(chosen), shards)
            yield loader.batches(replace(plan, samples=chosen[plan.samples]) for plan in plans)

    def _plan(
        self, sizes: np.ndarray, labels: np.ndarray, shards: np.ndarray | None
    ) -> Iterator[BatchPlan]:
        share: dict[str, Any] = {"rank": self._world.rank, "ranks": self._world.ranks}
        if self._cell.what == TRAIN:
            recipe = self._recipe.replace(epochs=MOST_EPOCHS)
            parts = self._execution.accumulation_steps
            share |= {"labels": labels, "shards": shards, "parts": parts}
            return training_plans(recipe, sizes, 0, **share)
        return _repeat_evaluation(self._recipe, sizes, self._cell.batch, **share)


def _repeat_evaluation(
    recipe: Recipe, sizes: np.ndarray, batch: int, *, rank: int, ranks: int
) -> Iterator[BatchPlan]:
    """Yield evaluation plans that start again after the last image.

    `evaluation_plans` would pad the last batch, and padding is not an image.
    """
    for first in count(rank * batch, batch * ranks):
        samples = (first + np.arange(batch)) % len(sizes)
        yield centre_plan(recipe, samples, sizes[samples])


def open_data(cell: Cell, plan: Plan, recipe: Recipe) -> tuple[Index, np.ndarray]:
    """Return the index of a cell's training or validation images, and the rows to use.

    The rows are all, or `num_examples` of them, evenly spread. Raises `DataError` if there are
    fewer than a step takes, or more classes than logits.
    """
    data = Path(cell.data)
    split = "train" if cell.what == TRAIN else "val"
    index = open_index(find_split(data, split) if holds_split(data, split) else find_source(data))
    if len(index.classes) > recipe.logits:
        raise DataError(
            f"{data} has {len(index.classes)} classes, but the recipe has only {recipe.logits}"
            f" logits: --set logits={len(index.classes)}"
        )
    images = min(plan.num_examples or len(index), len(index))
    needed = recipe.global_batch_images if cell.what == TRAIN else 1
    if images < needed:
        raise DataError(
            f"{data} has {images} images to use, fewer than the {needed} of one step on all ranks"
        )
    return index, np.arange(images) * len(index) // images
