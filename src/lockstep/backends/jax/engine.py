"""The training step on JAX: a function without state, compiled as a whole, on CPUs, GPUs and TPUs.

The layout is NHWC. In mixed precision weights stay float32 and are cast where they are used. A step
takes over the memory of the values before it. JAX enqueues steps on every device; only `fetch`,
`evaluate`, `predict` and `read` wait for them.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import numpy as np

from lockstep.backends import Interval
from lockstep.backends.jax import programs
from lockstep.backends.jax.model import Array
from lockstep.backends.jax.programs import Rows
from lockstep.backends.jax.update import LossScale, Scale, Values, make_table, read_numbers
from lockstep.backends.jax.world import JaxWorld
from lockstep.backends.shared.batch_columns import list_columns, name_columns
from lockstep.backends.shared.channels_last import (
    canonical_shapes,
    convert_all,
    convert_from_canonical,
    convert_to_canonical,
    new_arrays,
)
from lockstep.backends.shared.device import build_memory_error
from lockstep.backends.shared.handles import FutureHandle
from lockstep.backends.shared.handles import Rows as FetchedRows
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.data import Batch
from lockstep.models.metrics import Scores
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.quantisation import check_scales, layers
from lockstep.models.state import State, check_masks
from lockstep.recipes import Execution, Recipe


class JaxEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self,
        recipe: Recipe,
        learning_rates: np.ndarray,
        world: JaxWorld,
        execution: Execution,
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._parts = execution.accumulation_steps
        if not world.on_gpu:
            keep_freed_memory()
        compiled = programs.find_programs(recipe, execution, world)
        self._train_step = compiled.step
        self._logits = compiled.logits
        self._scores = compiled.scores
        self._largest_inputs = compiled.largest_inputs
        self._table = world.replicate(make_table(recipe, learning_rates))
        self._numbers = world.replicate(read_numbers(recipe))
        self._scale = LossScale(recipe)
        arrays = new_arrays(recipe)
        self._names = list(arrays)
        table = recipe.list_tensors()
        parameters = {tensor.name: arrays[tensor.name] for tensor in table if tensor.is_trained}
        self._values: Values = world.replicate(
            Values(
                arrays,
                parameters,
                parameters if OPTIMIZERS[recipe.optimizer].has_second_moments else {},
                arrays if recipe.ema_decay else {},
                self._scale.state,
            )
        )
        self._helpers = programs.find_helpers(world)
        self._removed: dict[str, Array] = {}
        self._scales: dict[str, Array] = {}
        if recipe.quantisation != "none":
            self.quantise(dict.fromkeys(layers(recipe.spec), 1.0))
        self._held: tuple[np.ndarray, Array] | None = None
        self._done = 0
        # This thread waits for the steps of an interval while the main thread enqueues the next
        # ones.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="lockstep-fetch")

    def __enter__(self) -> "JaxEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.shutdown(wait=False)
        vars(self).clear()  # as in the PyTorch backend

    # Training

    def train(self, batches: Iterable[Batch], first: int) -> FutureHandle:
        """Enqueue one optimizer step for every batch, numbered from `first`."""
        sums = []
        for step, batch in enumerate(batches, first):
            with self._explain_errors(len(batch.labels)):
                rows = self._place_batch(batch)
                pace = self._helpers.find_pace(self._table, self._world.place(np.int32(step)))
                self._values, step_sums = self._train_step(
                    self._values, self._removed, self._scales, pace, self._numbers, rows
                )
            sums.append(step_sums)
            self._done = step + 1
        # A copy, because the next step takes over its memory
        scale = self._helpers.copy(self._values.scale.value)

        def fetch_rows() -> FetchedRows:
            table = np.array(sums, np.float64).reshape(-1, 4)
            finished_at = time.perf_counter()
            last = np.full((len(table), 1), np.asarray(scale), np.float64)
            return np.concatenate([table, last], axis=1), finished_at

        return FutureHandle(first, len(sums), self._waiting.submit(fetch_rows))

    def _place_batch(self, batch: Batch) -> Rows:
        columns = name_columns(self._recipe, list_columns(batch))
        labels = batch.labels.astype(np.int32)
        rest = self._world.place(Rows(None, labels, columns))
        return rest._replace(images=self._place_images(batch))

    def _place_images(self, batch: Batch) -> Array:
        if not batch.is_held:
            return self._world.place(batch.pixels)
        if self._held is None or self._held[0] is not batch.images:
            self._held = batch.pixels, self._world.place(batch.pixels)
        return self._held[1]

    @contextmanager
    def _explain_errors(self, images: int | None) -> Iterator[None]:
        """Turn errors of a failed operation on some images into those that say what to do."""
        try:
            with self._world.explain_errors():
                yield
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, jax.errors.JaxRuntimeError) and not reason.startswith(
                "RESOURCE_EXHAUSTED"
            ):
                raise
            raise build_memory_error(images, self._parts, reason) from None

    def fetch(self, handle: FutureHandle) -> Interval:
        """Wait for the steps and return their results over all ranks."""
        with self._explain_errors(None):
            table, finished_at = handle.result.result()
        last = table[-1, 4] if len(table) else np.asarray(self._values.scale.value)
        return Interval.from_table(handle.first, table, float(last), finished_at)

    # Inference

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks."""
        if self._world.ranks > 1:
            self._share_statistics()
        of = self._world.take_local(self._values.ema if ema else self._values.tensors)
        with self._explain_errors(None):
            columns = 2 if with_logits else 1
            parts = [self._score_batch(of, batch)[:columns] for batch in batches]
            rows = [np.zeros((0, 5 + self._recipe.logits * with_logits), np.float32)]
            table = np.concatenate([*rows, *map(np.hstack, parts)])
            if self._world.ranks > 1:
                table = np.asarray(self._helpers.gather(self._world.place(table)))
            return Scores.unpack_table(table)

    def _score_batch(self, of: dict[str, Array], batch: Batch) -> tuple[Array, Array]:
        images = self._world.take_local(self._place_images(batch))
        scales = self._world.take_local(self._scales)
        return self._scores(of, scales, images, batch.labels.astype(np.int32))

    def _share_statistics(self) -> None:
        """Take the batch norm statistics of rank 0."""
        leads = self._world.place(np.bool_(self._world.rank == 0))
        shared = []
        for arrays in (self._values.tensors, self._values.ema):
            statistics = {
                name: value for name, value in arrays.items() if name not in self._values.velocity
            }
            shared.append({**arrays, **self._helpers.take_first(statistics, leads)})
        self._values = self._values._replace(tensors=shared[0], ema=shared[1])

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        count = len(images)
        if count == 0:
            return np.zeros((0, self._recipe.logits), np.float32)
        # XLA compiles for every number of images: powers of 2 are fewer.
        filling = 2 ** (count - 1).bit_length() - count
        filled = np.concatenate([images, np.zeros((filling, *images.shape[1:]), np.uint8)])
        with self._explain_errors(count):
            tensors, scales = self._world.take_local((self._values.tensors, self._scales))
            return np.array(self._logits(tensors, scales, filled)[:count])

    # Quantisation

    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the largest magnitude of the input of every quantised layer, over all images."""
        largest = dict.fromkeys(layers(self._recipe.spec), 0.0)
        of = self._world.take_local(self._values.tensors)
        for batch in batches:
            with self._explain_errors(len(batch.labels)):
                images = self._world.take_local(self._place_images(batch))
                inputs = self._largest_inputs(of, images)
            largest = {
                name: float(np.maximum(value, inputs[name])) for name, value in largest.items()
            }
        return largest

    def quantise(self, scales: Mapping[str, float]) -> None:
        """Quantise the inputs of layers with these scales from here on."""
        check_scales(self._recipe.spec, scales)
        values = {name: np.float32(scale) for name, scale in scales.items()}
        self._scales = self._world.replicate(values)

    # State

    def read(self) -> State:
        """Return a copy of the state."""
        values = self._world.take_local(self._values)
        with self._explain_errors(None):
            tensors, velocity, second_moments, average = (
                # JAX sorts the names.
                {name: convert_to_canonical(arrays[name]) for name in self._names if name in arrays}
                for arrays in values[:4]
            )
            self._scale.state = Scale(*map(np.array, values.scale))
            scaler = self._scale.read()
        return State(self._done, tensors, velocity, average, scaler, second_moments)

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        old = self._values
        self._scale.write(state.scaler)
        new = Values(
            convert_all(old.tensors, state.tensors, "tensors"),
            convert_all(old.velocity, state.momentum, "momentum"),
            convert_all(old.second_moments, state.second_moments, "second moments"),
            convert_all(old.ema, state.ema, "moving averages"),
            self._scale.state,
        )
        self._values = self._world.replicate(new)
        self._done = state.step
        self._apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        check_masks(canonical_shapes(self._values.velocity), masks)
        removed = {
            name: convert_from_canonical(~np.asarray(mask, bool)) for name, mask in masks.items()
        }
        if masks:
            # One of every parameter, so that all masks have the same compiled step
            nothing = {
                name: np.zeros(value.shape, bool) for name, value in self._values.velocity.items()
            }
            removed = nothing | removed
        self._removed = self._world.replicate(removed)
        self._apply_masks()

    def _apply_masks(self) -> None:
        if self._removed:
            self._values = self._helpers.clear_removed(self._values, self._removed)
