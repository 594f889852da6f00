"""Run the workload on one backend.

The command is `python -m lockstep.verification.backend_process FOLDER BACKEND`.

The process reads the workload from FOLDER and prints its progress as lines of JSON. It writes
BACKEND.npz (what is compared) and BACKEND.json (what it ran on) into FOLDER. Every backend has a
separate process, because frameworks cannot share one, and MXNet has a separate environment.
"""

import json
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends import Backend, Engine, World
from lockstep.data import Batch
from lockstep.data.decoding.augment import augment
from lockstep.data.index import open_index
from lockstep.data.loading.loaders import plan_training
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.augmentation_list import list_augmentations
from lockstep.recipes.initial_weights import initial_second_moments
from lockstep.recipes.order import BatchPlan, keep_blocks, keep_features
from lockstep.system.workers import end_with_parent, tell
from lockstep.verification.workload import (
    BINARY,
    CLIP_NORM,
    CROSS_ENTROPY,
    DECAY,
    DRAWN,
    FINE_TUNING,
    OPTIMIZER_RATE,
    OPTIMIZER_STEP,
    SHOWN_OPTIMIZERS,
    Arrays,
    Workload,
    add_prefix,
    load,
    load_batches,
    save_arrays,
)

UNMIXED: dict[str, Any] = dict.fromkeys(
    ("coefficients", "partners", "target_coefficients", "boxes")
)
"""Columns of a batch of which no image is mixed."""


class Worker:
    """Runs a workload. With `rules`, also runs what is compared with definitions, which the
    reference does not need."""

    def __init__(
        self,
        backend: Backend,
        world: World,
        execution: Execution,
        workload: Workload,
        *,
        rules: bool,
    ) -> None:
        self._backend = backend
        self._world = world
        self._execution = execution
        self._workload = workload
        self._plain = workload.plain_recipe
        self._batch = _mix(workload.batches[0])
        self._done = 0
        self._tasks = [
            self._inference,
            self._single_step,
            self._initial_gradient,
            self._two_parts,
            self._fine_tuning,
            self._free_run,
        ]
        if rules:
            self._tasks += [self._decay, self._momentum, self._update, self._counts, self._state]
            self._tasks += [partial(self._step_of, name) for name in SHOWN_OPTIMIZERS]
        self._tasks.append(self._load_images)
        self.train_sec = 0.0

    def run(self) -> Arrays:
        """Return everything that is compared, by quantity."""
        arrays: Arrays = {}
        for task in self._tasks:
            arrays |= task()
            self._advance()
        return arrays

    def _advance(self) -> None:
        self._done += 1
        total = len(self._tasks) + len(self._workload.batches)
        tell(self._done, total)

    def _engine(
        self, recipe: Recipe, rates: np.ndarray, state: State | None = None, parts: int = 1
    ) -> Engine:
        """Return an engine with the workload's state, or with another state."""
        execution = self._execution.replace(accumulation_steps=parts)
        engine = self._backend.engine(recipe, rates, self._world, execution)
        state = state or self._workload.state
        average = dict(state.tensors) if recipe.ema_decay else {}
        moments = initial_second_moments(recipe)
        if moments:
            moments = state.second_moments or moments
        engine.write(replace(state, ema=average, second_moments=moments))
        return engine

    def _inference(self) -> Arrays:
        """Return logits, and losses of an evaluation with mirror images; `_counts` evaluates
        without."""
        flipping = self._plain.replace(eval_flips=True)
        with self._engine(flipping, self._workload.rates) as engine:
            logits = engine.predict(self._workload.batches[0].pixels)
            losses = engine.evaluate(self._workload.evaluation).losses
        return {"logits": logits, "evaluation": losses}

    def _single_step(self) -> Arrays:
        """Return loss, gradient and statistics of a step on mixed images, without decay."""
        with self._engine(self._plain, np.zeros(1)) as engine:
            loss = engine.fetch(engine.train([self._batch], 0)).losses
            state = engine.read()
        statistics = {
            name: value for name, value in state.tensors.items() if name not in state.momentum
        }
        return (
            {"loss": loss}
            | add_prefix("gradient", state.momentum)
            | add_prefix("statistics", statistics)
        )

    def _initial_gradient(self) -> Arrays:
        """Return the gradient at the recipe's initial weights, where ReLUs do switch."""
        with self._engine(self._plain, np.zeros(1), self._workload.initial) as engine:
            engine.train(self._workload.batches[:1], 0)
            return add_prefix("initial gradient", engine.read().momentum)

    def _two_parts(self) -> Arrays:
        """Return loss and gradient of a step with class weights, dropout, stochastic depth and a
        limited gradient in two parts, each with its own batch norm and partners."""
        weights = np.linspace(0.5, 1.5, self._plain.logits)
        changes = {"class_weights": weights.tolist(), "clip_norm": CLIP_NORM, **CROSS_ENTROPY}
        recipe = self._plain.replace(dropout=0.25, stochastic_depth=0.5, **changes)
        batch = _drop(_mix(self._workload.batches[0], parts=2), recipe)
        with self._engine(recipe, np.zeros(1), parts=2) as engine:
            loss = engine.fetch(engine.train([batch], 0)).losses
            momentum = engine.read().momentum
        return {"weighted loss": loss} | add_prefix("two parts", momentum)

    def _fine_tuning(self) -> Arrays:
        """Return what a step at rate 1 changes where tensors are frozen or have rates of their own:
        the velocity, statistics, and how far the weights moved. Its loss is binary cross-entropy
        of images with CutMix."""
        recipe = self._plain.replace(**FINE_TUNING, **BINARY)
        with self._engine(recipe, np.ones(1)) as engine:
            loss = engine.fetch(engine.train([_cut(self._batch)], 0)).losses
            end = engine.read()
        statistics = {name: v for name, v in end.tensors.items() if name not in end.momentum}
        return (
            {"binary loss": loss}
            | add_prefix("frozen gradient", end.momentum)
            | add_prefix("frozen statistics", statistics)
            | add_prefix("rates by tensor", self._subtract_start(end))
        )

    def _free_run(self) -> Arrays:
        """Run all steps in order; return the losses, how far the weights moved, and their moving
        average."""
        losses = []
        began = time.perf_counter()
        with self._engine(self._workload.recipe, self._workload.rates) as engine:
            for step, batch in enumerate(self._workload.batches):
                losses.append(engine.fetch(engine.train([batch], step)).losses[0])
                self._advance()
            self.train_sec = time.perf_counter() - began
            end = engine.read()
        return (
            {"losses": np.array(losses)}
            | add_prefix("weights", self._subtract_start(end))
            | add_prefix("moving average", end.ema)
        )

    def _subtract_start(self, end: State) -> Arrays:
        """Return how far the trained tensors have moved."""
        return _subtract(
            {name: end.tensors[name] for name in end.momentum}, self._workload.state.tensors
        )

    def _decay(self) -> Arrays:
        """Return what decay adds to a first velocity."""
        velocities = []
        for decay in (0.0, DECAY):
            with self._engine(self._plain.replace(weight_decay=decay), np.zeros(1)) as engine:
                engine.train([self._batch], 0)
                velocities.append(engine.read().momentum)
        return add_prefix("decay", _subtract(velocities[1], velocities[0]))

    def _momentum(self) -> Arrays:
        """Return what remains of a velocity.

        At rate 0, a second step on the same images has the same gradient g; v = m * v + g.
        """
        velocities = []
        with self._engine(self._plain, np.zeros(2)) as engine:
            for step in range(2):
                engine.train([self._batch], step)
                velocities.append(engine.read().momentum)
        return add_prefix("momentum", _subtract(velocities[1], velocities[0]))

    def _update(self) -> Arrays:
        """Return how far one step of SGD at a large rate moves the weights, and the velocity after
        it."""
        step = self._workload.telling_step
        recipe = self._workload.recipe.replace(optimizer="sgd", clip_norm=0.0)
        with self._engine(recipe, self._workload.large_rates) as engine:
            engine.train(self._workload.batches[step : step + 1], step)
            end = engine.read()
        moved = self._subtract_start(end)
        return add_prefix("update", moved) | add_prefix("velocity", end.momentum)

    def _step_of(self, optimizer: str) -> Arrays:
        """Return the state after a step of an optimizer."""
        recipe = self._workload.optimizer_recipe(optimizer)
        rates = np.full(OPTIMIZER_STEP + 2, OPTIMIZER_RATE)
        begin = self._workload.optimizer_state
        with self._engine(recipe, rates, begin) as engine:
            engine.train([self._batch], OPTIMIZER_STEP)
            end = engine.read()
        averages = {name: end.ema[name] for name in end.momentum}
        return (
            add_prefix(f"{optimizer} velocity", end.momentum)
            | add_prefix(f"{optimizer} moments", end.second_moments)
            | add_prefix(f"{optimizer} update", self._subtract_start(end))
            | add_prefix(f"{optimizer} update/average", _subtract(averages, begin.tensors))
        )

    def _counts(self) -> Arrays:
        """Return hits of a training step and ranks of an evaluation. Logits fall from class to
        class for any image."""
        tensors = self._workload.state.tensors
        logits = self._plain.logits
        falling = {
            "fc.weight": np.zeros_like(tensors["fc.weight"]),
            "fc.bias": -np.arange(logits, dtype=np.float32),
        }
        batch = self._workload.batches[0]
        labels = np.arange(len(batch.labels)) % logits
        padded = np.where(np.arange(len(labels)) < len(labels) - 1, labels, -1)
        state = replace(self._workload.state, tensors=tensors | falling)
        with self._engine(self._plain, np.zeros(1), state) as engine:
            scores = engine.evaluate([Batch(batch.images, padded)])
            unmixed = replace(batch, labels=labels, **UNMIXED)
            counts = engine.fetch(engine.train([unmixed], 0)).counts
        hits = [counts.top1, counts.top5, counts.images]
        return {"counts": np.array([*hits, *scores.ranks, *scores.predictions])}

    def _state(self) -> Arrays:
        """Write a state with every part; return how far the state that is read differs."""
        state = self._workload.state
        random = np.random.default_rng(1)
        written = State(3, state.tensors, {}, {}, second_moments={})
        for name, value in state.momentum.items():
            written.momentum[name] = random.normal(size=value.shape).astype(np.float32)
            written.second_moments[name] = random.uniform(size=value.shape).astype(np.float32)
        for name, value in state.tensors.items():
            written.ema[name] = value / 2
        recipe = self._workload.recipe.replace(optimizer="adamw", nesterov=False)
        with self._backend.engine(recipe, np.zeros(4), self._world, self._execution) as engine:
            engine.write(written)
            read = engine.read()
        differences = [read.step - 3]
        for name in ("tensors", "momentum", "ema", "second_moments"):
            parts = _subtract(getattr(read, name), getattr(written, name))
            differences += [np.abs(difference).max() for difference in parts.values()]
        return {"state": np.array(differences)}

    def _load_images(self) -> Arrays:
        """Return what this environment's loader makes, and its augmentations of the same pixels.

        They are apart, because equalising an image makes a large difference of a small one.
        """
        plain = self._workload.recipe.replace(augmentations=())
        loaded = []
        for recipe in (plain, plain.replace(**DRAWN)):
            training, validation = load_batches(recipe, self._workload.data)
            loaded += training + validation
        arrays = {}
        for name in ("samples", "windows", "flips"):
            arrays[f"loader {name}"] = np.concatenate([getattr(plan, name) for plan, _ in loaded])
        arrays["loader draws"] = np.concatenate([_list_draws(plan) for plan, _ in loaded])
        arrays["loader pixels"] = np.concatenate([batch.pixels.ravel() for _, batch in loaded])
        arrays["loader augmentations"] = self._augment_images()
        return arrays

    def _augment_images(self) -> np.ndarray:
        """Return the images of the first batch after the recipe's augmentations, and then after
        each that Lockstep has: uint8 [augmentations + 1, N, size, size, 3]."""
        images = self._workload.batches[0].pixels.copy()
        index = open_index(self._workload.data / "train")
        augmented = []
        for augmentations in (self._workload.recipe.augmentations, *list_augmentations()):
            recipe = self._workload.recipe.replace(augmentations=augmentations)
            plan = next(plan_training(index, recipe, 0))
            if plan.augmentations is not None:
                for image, parameters in zip(images, plan.augmentations, strict=True):
                    augment(recipe.augmentations, parameters, image)
            augmented.append(images.copy())
        return np.stack(augmented)


def _list_draws(plan: BatchPlan) -> np.ndarray:
    """Return the numbers of a plan, one after the other: float64. Augmentations are not numbers."""
    columns = [np.array([plan.size])]
    for field in fields(BatchPlan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray) and value.dtype != object:
            columns.append(value.ravel())
    return np.concatenate(columns).astype(np.float64)


def _mix(batch: Batch, parts: int = 1) -> Batch:
    """Return a batch with MixUp, whether or not the recipe has it. Coefficients differ; partners
    are within a part."""
    count = len(batch.labels)
    partners = np.tile(np.roll(np.arange(count // parts), 3), parts)
    coefficients = np.linspace(0.2, 0.9, count, dtype=np.float32)
    return replace(batch, **UNMIXED | {"coefficients": coefficients, "partners": partners})


def _cut(batch: Batch) -> Batch:
    """Return a batch in which every other image has a box of its partner's pixels, not MixUp."""
    count, size = batch.pixels.shape[:2]
    is_cut = np.arange(count) % 2 == 0
    places = np.arange(count) * size // (2 * count)
    sides = np.full(count, size // 3)
    boxes = np.stack([places, size // 2 - places, sides, sides + size // 8], axis=1)
    boxes = boxes.astype(np.int32) * is_cut[:, None]
    outside = (1 - boxes[:, 2] * boxes[:, 3] / size**2).astype(np.float32)
    assert batch.coefficients is not None
    return replace(
        batch,
        coefficients=np.where(is_cut, np.float32(1), batch.coefficients),
        target_coefficients=np.where(is_cut, outside, batch.coefficients),
        boxes=boxes,
    )


def _drop(batch: Batch, recipe: Recipe) -> Batch:
    """Return a batch with the recipe's dropout and stochastic depth."""
    positions = np.arange(len(batch.labels))
    return replace(
        batch,
        kept_features=keep_features(recipe, 0, positions),
        kept_blocks=keep_blocks(recipe, 0, positions),
    )


def _subtract(arrays: Arrays, others: Arrays) -> Arrays:
    """Return the differences of arrays from those of the same names, in float64."""
    return {name: value.astype(np.float64) - others[name] for name, value in arrays.items()}


def main(folder: Path, name: str) -> None:
    """Run the workload in `folder`. Exit at once when the process that waits for it has ended."""
    end_with_parent()
    execution = Execution(backend=name)
    backend = backends.load(name)
    world = backend.world(execution)
    worker = Worker(backend, world, execution, load(folder), rules=name != "reference")
    arrays = worker.run()
    save_arrays(folder / f"{name}.npz", arrays)
    about = {
        "version": backends.FRAMEWORKS[name].version(),
        "device": world.device,
        "train_sec": worker.train_sec,
    }
    (folder / f"{name}.json").write_text(json.dumps(about, allow_nan=False), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
