"""The training step on TensorFlow: variables, plain operations and one `tf.function`, for CPU and
GPU.

The layout is NHWC. In mixed precision weights stay float32 and are cast where they are used. The
update is TensorFlow's own momentum operation. It has the learning rate outside the velocity, like
the canonical form (Keras' SGD has it inside). Only `fetch`, `evaluate`, `predict` and `read` wait
for the device. On a GPU, TensorFlow's copy of a batch waits for the previous step.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from lockstep.backends import Interval
from lockstep.backends.shared.batch_columns import list_columns, name_columns
from lockstep.backends.shared.channels_last import convert_to_canonical
from lockstep.backends.shared.device import build_memory_error
from lockstep.backends.shared.handles import FutureHandle, Rows
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.backends.tensorflow.losses import ImageLosses, mix_images
from lockstep.backends.tensorflow.model import (
    COMPUTED_IN,
    Pass,
    Tensor,
    copy_into,
    graph,
    new_variables,
)
from lockstep.backends.tensorflow.update import Update
from lockstep.backends.tensorflow.world import TensorflowWorld
from lockstep.data import Batch
from lockstep.models.metrics import Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError


class TensorflowEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self,
        recipe: Recipe,
        learning_rates: np.ndarray,
        world: TensorflowWorld,
        execution: Execution,
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._parts = execution.accumulation_steps
        self._sent = COMPUTED_IN.get(execution.all_reduce_precision, tf.float32)
        self._done = 0
        self._recomputes = execution.recompute == "blocks"
        self._synchronised = recipe.batch_norm == "synchronised" and world.ranks > 1
        _check_execution(execution, synchronised=self._synchronised, on_gpu=world.on_gpu)
        _configure(recipe, execution, world)
        pays = world.on_gpu and not self._synchronised and not execution.deterministic
        self._compile = execution.compile == "on" or (execution.compile == "auto" and pays)
        self._tensors = new_variables(recipe)
        self._update = Update(recipe, self._tensors, learning_rates)
        self._scale = self._update.scale
        self._ema = self._update.ema
        self._losses = ImageLosses(recipe)
        self._held: tuple[np.ndarray, Tensor] | None = None
        self._mean = tf.constant(recipe.mean, tf.float32)
        self._std = tf.constant(recipe.std, tf.float32)
        self._train_step = self._trace_step()
        takes_images = {"input_signature": [tf.TensorSpec([None, None, None, 3], tf.uint8)]}
        exact = recipe.evaluation_recipe()  # traced when they are first used
        self._logits = graph(
            lambda images: self._infer(images, recipe, self._tensors), **takes_images
        )
        self._evaluated, self._evaluated_ema = (
            graph(
                lambda images, of=values: self._evaluate_images(images, exact, of), **takes_images
            )
            for values in (self._tensors, self._ema)
        )
        if exact == recipe and not recipe.eval_flips:
            self._evaluated = self._logits
        rows = tf.TensorSpec([None, None], tf.float64)  # sums of steps, scores of images
        self._total = graph(lambda table: world.run(self._sum_rows, table), input_signature=[rows])
        self._shared = graph(lambda leads: world.run(self._share_statistics, leads))
        # On a GPU this thread waits for the steps of an interval while the main thread enqueues the
        # next ones.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="lockstep-fetch")

    def __enter__(self) -> "TensorflowEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.shutdown(wait=False)
        vars(self).clear()  # as in the PyTorch backend

    # Training

    def _trace_step(self) -> Callable[..., Tensor]:
        """Return the step as a graph. It is traced again for batches of another shape or kind."""
        alone = self._world.ranks == 1
        gradients = self._gradients
        update = self._update.apply
        if self._compile and not alone:  # XLA must not compile collective operations
            gradients = graph(gradients, jit_compile=True)
            update = graph(update, jit_compile=True)

        def step(step: Tensor, *columns: Tensor) -> Tensor:
            part, sums = gradients(*columns)
            update(self._add_up(part), step)
            return sums

        return graph(
            lambda *inputs: self._world.run(step, *inputs), jit_compile=self._compile and alone
        )

    def _add_up(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the sums of gradients over all ranks, which are sent in `all_reduce_precision`."""
        if self._world.ranks == 1:
            return gradients
        sent = self._world.sum([tf.cast(gradient, self._sent) for gradient in gradients])
        return [tf.cast(total, tf.float32) for total in sent]

    def train(self, batches: Iterable[Batch], first: int) -> FutureHandle:
        """Enqueue one optimizer step for every batch, numbered from `first`."""
        sums = []
        for step, batch in enumerate(batches, first):
            columns = [self._images(batch), tf.constant(batch.labels)]
            columns += map(tf.constant, list_columns(batch))
            try:
                with self._world.explain_errors():
                    sums.append(self._train_step(tf.constant(step, tf.int64), *columns))
            except tf.errors.ResourceExhaustedError as error:
                raise build_memory_error(
                    len(batch.labels), self._parts, str(error).splitlines()[0]
                ) from None
            self._done = step + 1
        with self._world.explain_errors():
            table = self._total(tf.stack(sums)) if sums else tf.zeros([0, 4], tf.float64)
        scale = tf.fill([len(sums), 1], tf.cast(self._scale.value, tf.float64))
        return FutureHandle(first, len(sums), self._fetching(tf.concat([table, scale], axis=1)))

    def _images(self, batch: Batch) -> Tensor:
        # By main memory: TensorFlow aborts the process if memory that comes by DLPack does not
        # start at a multiple of 64.
        if not batch.is_held:
            return tf.constant(batch.pixels)
        if self._held is None or self._held[0] is not batch.images:
            self._held = batch.pixels, tf.constant(batch.pixels)
        return self._held[1]

    def _fetching(self, table: Tensor) -> "Future[Rows]":
        def fetch_rows() -> Rows:
            return table.numpy(), time.perf_counter()

        if self._world.on_gpu:
            return self._waiting.submit(fetch_rows)
        done: Future[Rows] = Future()  # on a CPU enqueued work is already done
        done.set_result(fetch_rows())
        return done

    def _gradients(self, *columns: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of scale / ranks * (mean loss), added up over the parts, and the
        sums.

        Running statistics are updated.
        """
        if self._parts == 1:
            return self._gradients_of_part(*columns)
        parted = [tf.reshape(column, [self._parts, -1, *column.shape[1:]]) for column in columns]

        def add(
            part: Tensor, gradients: list[Tensor], sums: Tensor
        ) -> tuple[Tensor, list[Tensor], Tensor]:
            more, more_sums = self._gradients_of_part(*(column[part] for column in parted))
            return part + 1, [a + b for a, b in zip(gradients, more, strict=True)], sums + more_sums

        zeros = [tf.zeros(parameter.shape) for parameter in self._update.trained.values()]
        start = (tf.constant(0), zeros, tf.zeros([4], tf.float64))
        if self._synchronised:  # the strategy cannot add up over ranks inside a loop of the graph
            for _ in range(self._parts):
                start = add(*start)
            return start[1:]
        _, gradients, sums = tf.while_loop(
            lambda part, *_: part < self._parts,
            add,
            start,
            parallel_iterations=1,
            maximum_iterations=self._parts,
        )
        return gradients, sums

    def _gradients_of_part(
        self, images: Tensor, labels: Tensor, *columns: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return the gradients and sums of a part.

        `columns` are in the order of `list_columns`.
        """
        x = self._normalise(images)
        named = name_columns(self._recipe, columns)
        target: tuple[Tensor, ...] = ()
        if named.partners is not None:
            x = mix_images(x, named.coefficients, named.partners, named.boxes)
            target = (named.target_coefficients, named.partners)
        # XLA's own batch norm computes the variance as E[x^2] - E[x]^2 in float32, which loses
        # digits.
        moments = self._moments if self._synchronised or self._compile else None
        run = Pass(
            self._recipe, self._tensors, training=True, moments=moments, recompute=self._recomputes
        )
        # Only what leads to a trained tensor is recorded, and computed backwards.
        trained = list(self._update.trained.values())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            logits = run.logits(x, named.kept_features, named.kept_blocks)
            losses = self._losses(logits, labels, *target)
            loss = tf.reduce_mean(losses) * (self._scale.value / (self._parts * self._world.ranks))
        gradients = tape.gradient(loss, trained)
        for name, value in run.statistics.items():
            self._tensors[name].assign(value)
        rank = _rank_labels(logits, labels)
        sums = [losses, rank < 1, rank < 5, tf.ones_like(losses)]
        return gradients, tf.stack([tf.reduce_sum(tf.cast(column, tf.float64)) for column in sums])

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return mean and variance, in float32, over the images of all ranks if batch norm is
        synchronised."""
        x = tf.cast(x, tf.float32)
        over_ranks = self._world.sum if self._synchronised else list
        count = (
            x.shape.num_elements() // x.shape[-1] * (self._world.ranks if self._synchronised else 1)
        )
        (mean,) = over_ranks([tf.reduce_sum(x, axis=[0, 1, 2]) / count])
        (variance,) = over_ranks([tf.reduce_sum(tf.square(x - mean), axis=[0, 1, 2]) / count])
        return mean, variance, count

    def _normalise(self, images: Tensor) -> Tensor:
        """Return uint8 images as float32, (x - mean) / std."""
        return (tf.cast(images, tf.float32) - self._mean) / self._std

    def fetch(self, handle: FutureHandle) -> Interval:
        """Wait for the steps and return their results over all ranks."""
        table, finished_at = handle.result.result()
        loss_scale = float(table[-1, 4]) if len(table) else float(self._scale.value)
        return Interval.from_table(handle.first, table, loss_scale, finished_at)

    # Inference

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks."""
        if self._world.ranks > 1:
            with self._world.explain_errors():
                self._shared(tf.constant(self._world.rank == 0))
        rows = [tf.zeros([0, 5 + self._recipe.logits * with_logits], tf.float64)]
        for batch in batches:
            logits = (self._evaluated_ema if ema else self._evaluated)(self._images(batch))
            scores = _score(logits, tf.constant(batch.labels))
            if with_logits:
                scores = tf.concat([scores, tf.cast(logits, tf.float64)], axis=1)
            rows.append(scores)
        with self._world.explain_errors():
            table = self._gather(tf.concat(rows, axis=0)).numpy()
        return Scores.unpack_table(table)

    def _sum_rows(self, table: Tensor) -> Tensor:
        (total,) = self._world.sum([table])
        return total

    def _share_statistics(self, leads: Tensor) -> list[Tensor]:
        """Copy the batch norm statistics of rank 0, which leads, to every rank."""
        statistics = [
            variable
            for variables in (self._tensors, self._ema)
            for name, variable in variables.items()
            if name not in self._update.parameters
        ]
        # `leads` is an input and not a constant of the graph: otherwise TensorFlow would fold the
        # zeros into a constant and exchange them with the other ranks only once.
        shared = self._world.sum(
            [tf.where(leads, value, tf.zeros_like(value)) for value in statistics]
        )
        if self._world.rank > 0:
            for variable, value in zip(statistics, shared, strict=True):
                variable.assign(value)
        # otherwise TensorFlow would leave out the exchange on rank 0, and the others would wait for
        # it
        return shared

    def _gather(self, table: Tensor) -> Tensor:
        """Return the rows of all ranks, as a sum in which each rank has zeros for the rows of the
        others.

        All ranks must have the same number of rows.
        """
        ranks = self._world.ranks
        rank = self._world.rank
        rows = len(table)
        return self._total(tf.pad(table, [[rank * rows, (ranks - 1 - rank) * rows], [0, 0]]))

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        if len(images) == 0:  # TensorFlow's convolutions refuse empty batches
            return np.zeros((0, self._recipe.logits), np.float32)
        compute = self._logits if images.dtype == np.uint8 else self._logits.python_function
        return compute(tf.constant(images)).numpy()

    def _infer(self, images: Tensor, recipe: Recipe, values: Mapping[str, Tensor]) -> Tensor:
        return Pass(recipe, values, training=False).logits(self._normalise(images))

    def _evaluate_images(
        self, images: Tensor, recipe: Recipe, values: Mapping[str, Tensor]
    ) -> Tensor:
        logits = self._infer(images, recipe, values)
        if not recipe.eval_flips:
            return logits
        return (logits + self._infer(tf.reverse(images, axis=[2]), recipe, values)) / 2

    # State

    def read(self) -> State:
        """Return a copy of the state."""
        update = self._update
        values, velocity, average, second_moments = (
            {name: convert_to_canonical(variable) for name, variable in variables.items()}
            for variables in (self._tensors, update.velocity, self._ema, update.second_moments)
        )
        return State(self._done, values, velocity, average, self._scale.read(), second_moments)

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        copy_into(self._tensors, state.tensors, "tensors")
        copy_into(self._update.velocity, state.momentum, "momentum")
        copy_into(self._ema, state.ema, "moving averages")
        copy_into(self._update.second_moments, state.second_moments, "second moments")
        self._scale.write(state.scaler)
        self._done = state.step
        self._update.apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        if self._update.mask(masks):
            self._train_step = self._trace_step()


@graph(reduce_retracing=True)  # type: ignore[untyped-decorator]
def _score(logits: Tensor, labels: Tensor) -> Tensor:
    """Return float64 [N, 5]: loss, rank of the right class, prediction, label, confidence."""
    known = tf.maximum(labels, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(known, logits)
    confidences = 1 / tf.reduce_sum(
        tf.exp(logits - tf.reduce_max(logits, axis=1, keepdims=True)), axis=1
    )
    columns = [losses, _rank_labels(logits, known), tf.argmax(logits, axis=1), labels, confidences]
    return tf.stack([tf.cast(column, tf.float64) for column in columns], axis=1)


def _rank_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes rank above the label: int64 [N]. Ties go to the lower class. NaN
    ranks first."""
    own = tf.gather(logits, labels[:, None], batch_dims=1)
    before = tf.range(tf.shape(logits, tf.int64)[1])[None] < labels[:, None]
    # Not written as "not (logits <= own)", which TensorFlow's optimizer turns into "logits > own".
    comes_first = (
        (logits > own) | tf.math.is_nan(logits) | tf.math.is_nan(own) | ((logits == own) & before)
    )
    return tf.reduce_sum(tf.cast(comes_first, tf.int64), axis=1)


def _check_execution(execution: Execution, *, synchronised: bool, on_gpu: bool) -> None:
    if synchronised and execution.recompute == "blocks":
        raise BackendError(
            "batch norm over all ranks cannot be computed twice here; leave recompute at off"
        )
    if synchronised and execution.compile == "on":
        raise BackendError("XLA cannot compile batch norm over all ranks; leave compile at auto")
    if execution.compile == "on" and execution.deterministic and on_gpu:
        raise BackendError(
            "XLA has no deterministic max pool on GPUs; add --set deterministic=false, or leave"
            " compile at auto"
        )


def _configure(recipe: Recipe, execution: Execution, world: TensorflowWorld) -> None:
    if not world.on_gpu:
        keep_freed_memory()
    elif execution.deterministic:
        tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(recipe.precision == "tf32")
