"""The training step on MXNet: forward and backward as a compiled graph, the update on three
vectors.

One vector holds all tensors of the model. Gradients, velocities and averages have one vector each,
too. The update, the sum over ranks and the moving average are thus a few operations on whole
vectors, and the graph computes with views. MXNet executes all calls asynchronously, also on a CPU.
Only `fetch`, `evaluate`, `predict` and `read` wait.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import mxnet as mx
import numpy as np

from lockstep.backends import Interval
from lockstep.backends.mxnet.losses import ImageLosses, log_sum_exp, mix_images
from lockstep.backends.mxnet.model import Pass, variables
from lockstep.backends.mxnet.update import Update
from lockstep.backends.mxnet.world import Array, MxnetWorld
from lockstep.backends.shared.device import build_memory_error
from lockstep.backends.shared.handles import FutureHandle, Rows
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.backends.shared.layout import Layout
from lockstep.data import Batch
from lockstep.models.metrics import Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.stochastic_depth import branch_factors
from lockstep.system.errors import BackendError
from lockstep.system.machine import arithmetic

Result = TypeVar("Result")
_LOOK_SEC = 1.0
"""Seconds to wait for steps before checking whether all ranks still exist."""


class MxnetEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self, recipe: Recipe, learning_rates: np.ndarray, world: MxnetWorld, execution: Execution
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._parts = execution.accumulation_steps
        self._static = execution.compile != "off"
        self._synchronised = recipe.batch_norm == "synchronised" and world.ranks > 1
        if self._synchronised and execution.compile == "on":
            raise BackendError(
                "a static graph has no batch norm over all ranks; leave compile at auto"
            )
        _configure(recipe, execution, world)
        self._layout = layout = Layout(recipe)
        self._update = Update(recipe, layout, learning_rates, world.context)
        self._scale = self._update.scale
        self._values = self._update.values
        self._ema = self._update.ema
        self._slopes = mx.nd.zeros(layout.size, world.context)
        """Gradients, followed by mean and biased variance of a batch where `_values` has running
        statistics.

        They must be in one vector. MXNet does not know that the backward pass of a static graph
        writes statistics. But it knows that the pass writes gradients to this vector, so what reads
        the statistics waits for the pass.
        """
        self._gradient = self._slopes[layout.trained_place]
        self._views = layout.views(self._values)
        self._ema_views = {} if self._ema is None else layout.views(self._ema)
        slopes = layout.views(self._slopes)
        self._inputs = self._views | {name: slopes[name] for name in layout.statistics}
        """Inputs of the graph in training."""
        differentiated = list(layout.trained)
        if "fc.bias" in layout.trained and "fc.weight" not in layout.trained:
            differentiated.append("fc.weight")  # MXNet computes the gradient of both or none
        mx.autograd.mark_variables(
            [self._views[name] for name in differentiated],
            [slopes[name] for name in differentiated],
            "write" if self._parts == 1 else "add",
        )
        self._graphs: dict[tuple[int, int, bool, str], tuple[Any, list[str]]] = {}
        """By height, width, whether they train, and precision."""
        self._values_of_a_channel: dict[tuple[int, int], dict[str, int]] = {}
        """`Pass.values_of_a_channel`, by height and width of images."""
        self._unbiased: dict[tuple[int, ...], Array] = {}
        self._mean = self._array(np.array(recipe.mean, np.float32).reshape(1, 1, 1, 3))
        self._std = self._array(np.array(recipe.std, np.float32).reshape(1, 1, 1, 3))
        self._losses = ImageLosses(recipe, world.context)
        self._held: tuple[np.ndarray, Array] | None = None

    def __enter__(self) -> "MxnetEngine":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._world.lost and error[0] is None:
            mx.nd.waitall()
        vars(self).clear()  # as in the PyTorch backend

    def _array(self, values: np.ndarray) -> Array:
        return mx.nd.array(values, self._world.context, values.dtype)

    # Training

    def train(self, batches: Iterable[Batch], first: int) -> FutureHandle:
        """Enqueue one optimizer step for every batch, numbered from `first`."""
        rows = []
        for step, batch in enumerate(batches, first):
            with self._explain_errors():
                sums = self._forward_and_back(batch)
                self._world.sum(self._gradient, "gradient")
                self._world.sum(sums, "sums")
                rows.append(sums)
                self._update.apply(self._gradient, step)
        if rows:
            table = mx.nd.stack(*rows)
            scale = self._scale.value

        def fetch_rows() -> Rows:
            if not rows:  # MXNet has no empty arrays
                return np.zeros((0, 5)), time.perf_counter()
            sums = table.asnumpy()
            done = time.perf_counter()
            return np.concatenate([sums, np.full((len(sums), 1), scale.asscalar())], axis=1), done

        return FutureHandle(first, len(rows), run_in_thread(fetch_rows))

    def _forward_and_back(self, batch: Batch) -> Array:
        """Write the gradient of scale / ranks * (mean loss) to `_gradient` and return this rank's
        sums.

        Running statistics are updated.
        """
        size = len(batch.labels) // self._parts
        sums = None
        images = self._images(batch)
        labels = self._array(batch.labels.astype(np.int32))
        if self._parts > 1:
            self._gradient[:] = 0
        for part in range(self._parts):
            rows = slice(part * size, (part + 1) * size)
            x = self._normalise(images[rows])
            own = labels[rows]
            x = mix_images(x, batch, rows, channels_last=self._world.on_gpu)
            fed = {"images": x}
            if batch.kept_features is not None:
                factors = batch.kept_features[rows] / np.float32(1 - self._recipe.dropout)
                fed["feature_factors"] = self._array(factors)
            if batch.kept_blocks is not None:
                factors = branch_factors(self._recipe, batch.kept_blocks[rows])
                fed["branch_factors"] = self._array(factors)
            with mx.autograd.record():
                logits = self._graph(fed, self._inputs, self._recipe, training=True)
            targets = self._losses.make_targets(own, batch, rows)
            losses, slope = self._losses.compute(logits, targets)
            slope = mx.nd.broadcast_mul(
                slope,
                (self._scale.value / (size * self._parts * self._world.ranks)).reshape((1, 1)),
            )
            mx.autograd.backward([logits], [slope])
            self._move_statistics(size, x.shape)
            rank = _rank_labels(logits, own)
            columns = [losses, rank < 1, rank < 5, mx.nd.ones_like(losses)]
            counted = mx.nd.concat(*(column.astype("float64").sum() for column in columns), dim=0)
            sums = counted if sums is None else sums + counted
        return sums

    def _graph(
        self,
        fed: Mapping[str, Array],
        values: Mapping[str, Array],
        recipe: Recipe,
        *,
        training: bool,
    ) -> Array:
        """Return the logits of normalised images, in the recipe's precision.

        `fed` are the `images`, with dropout the `feature_factors`, and with stochastic depth the
        `branch_factors`.
        """
        height, width = self._read_size(fed["images"].shape)
        key = (height, width, training, recipe.precision)
        how: Any = {"size": (height, width), "training": training, "on_gpu": self._world.on_gpu}
        if training and self._synchronised:
            run = Pass(recipe, values, **how, moments=self._moments_over_ranks)
            logits = run.logits(**fed)
            self._values_of_a_channel[height, width] = run.values_of_a_channel
            return logits
        if key not in self._graphs:
            if training:
                # A static graph keeps its memory. That of the size before is not needed again.
                self._graphs = {old: graph for old, graph in self._graphs.items() if not old[2]}
            run = Pass(recipe, variables(recipe), **how)
            symbol = run.logits(**{name: mx.sym.var(name) for name in fed})
            names = symbol.list_inputs()
            flags = [
                ("data_indices", [names.index(name) for name in fed]),
                ("param_indices", [i for i, name in enumerate(names) if name not in fed]),
                ("static_alloc", self._static),
                ("static_shape", self._static),
            ]
            self._graphs[key] = mx.nd.CachedOp(symbol, flags), names
            self._values_of_a_channel[height, width] = run.values_of_a_channel
        graph, names = self._graphs[key]
        return graph(*(fed[name] if name in fed else values[name] for name in names))

    def _read_size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return height and width of normalised images."""
        return (shape[1], shape[2]) if self._world.on_gpu else (shape[2], shape[3])

    def _moments_over_ranks(self, x: Array, name: str) -> tuple[Array, Array]:
        """Return mean and biased variance, in float32, over the images of all ranks."""
        axes, shape = (
            ((0, 1, 2), (1, 1, 1, -1)) if self._world.on_gpu else ((0, 2, 3), (1, -1, 1, 1))
        )
        sums = x.sum(axes)
        count = x.size // sums.size * self._world.ranks
        mean = _SumOverRanks(self._world, f"{name} mean")(sums) / count
        squares = mx.nd.broadcast_sub(x, mean.reshape(shape)).square().sum(axes)
        return mean, _SumOverRanks(self._world, f"{name} variance")(squares) / count

    def _move_statistics(self, images: int, shape: tuple[int, ...]) -> None:
        """Move the running statistics towards those of the batch, with unbiased variances."""
        place = self._layout.moving_place
        if not self._layout.statistics:  # all batch norms are frozen
            return
        key = (images, *shape[1:])
        if key not in self._unbiased:
            factors = np.ones(self._layout.size, np.float32)
            images *= self._world.ranks if self._synchronised else 1
            height, width = self._read_size(shape)
            for name, count in self._values_of_a_channel[height, width].items():
                factors[self._layout.places[f"{name}.running_var"]] = (
                    images * count / (images * count - 1)
                )
            self._unbiased[key] = self._array(factors[place])
        statistics = self._values[place]
        moved = self._slopes[place] * self._unbiased[key]
        statistics += self._recipe.bn_momentum * (moved - statistics)

    def _images(self, batch: Batch) -> Array:
        if not batch.is_held:
            return self._array(batch.pixels)
        if self._held is None or self._held[0] is not batch.images:
            self._held = batch.pixels, self._array(batch.pixels)
        return self._held[1]

    def _normalise(self, images: Array) -> Array:
        """Return uint8 images [N, H, W, 3] as float32, (x - mean) / std, in the device's layout."""
        x = images.astype("float32")  # before the transpose: MXNet transposes bytes slowly
        if not self._world.on_gpu:
            return mx.nd.image.normalize(
                x.transpose((0, 3, 1, 2)), self._recipe.mean, self._recipe.std
            )
        return mx.nd.broadcast_div(mx.nd.broadcast_sub(x, self._mean), self._std)

    def fetch(self, handle: FutureHandle) -> Interval:
        """Wait for the steps and return their results over all ranks."""
        table, finished_at = self._wait_for(handle.result)
        loss_scale = float(table[-1, 4]) if len(table) else float(self._scale.value.asscalar())
        return Interval.from_table(handle.first, table, loss_scale, finished_at)

    def _wait_for(self, result: "Future[Result]") -> Result:
        with self._explain_errors():
            while True:
                try:
                    return result.result(timeout=_LOOK_SEC)
                except TimeoutError:  # a sum over ranks never ends if one of them has ended
                    self._world.refuse_loss()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn MXNet's error into one that says that a rank has ended, or what to do if memory is
        short."""
        try:
            yield
        except mx.MXNetError as error:
            self._world.refuse_loss(str(error))
            reason = str(error).strip().splitlines()[-1]
            if not any(word in reason.lower() for word in ("memory", "bad_alloc")):
                raise
            raise build_memory_error(None, self._parts, reason) from None

    # Inference

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks."""

        def share_statistics() -> None:
            for vector in (self._values, self._ema):
                if vector is not None:  # statistics are rank 0's
                    self._world.share(vector[self._layout.count :])

        self._wait_for(run_in_thread(share_statistics))
        recipe = self._recipe.evaluation_recipe()
        rows = []
        for batch in batches:
            with self._explain_errors():
                values = self._ema_views if ema else self._views
                images = self._images(batch)
                logits = self._infer(images, values, recipe)
                if recipe.eval_flips:
                    mirrored = mx.nd.flip(images, axis=2)
                    logits = (logits + self._infer(mirrored, values, recipe)) / 2
                scores = _score(logits, self._array(batch.labels.astype(np.int32)))
                if with_logits:
                    scores = mx.nd.concat(scores, logits.astype("float64"), dim=1)
                rows.append(scores)

        def gather_rows() -> np.ndarray:
            return self._world.gather(
                mx.nd.concat(*rows, dim=0).asnumpy() if rows else np.zeros((0, 5))
            )

        return Scores.unpack_table(self._wait_for(run_in_thread(gather_rows)))

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        if len(images) == 0:
            return np.zeros((0, self._recipe.logits), np.float32)
        return self._infer(self._array(images), self._views, self._recipe).asnumpy()

    def _infer(self, images: Array, values: Mapping[str, Array], recipe: Recipe) -> Array:
        # In training mode: otherwise MXNet changes the layout of the weights for oneDNN, within the
        # vector that they share.
        with mx.autograd.train_mode():
            fed = {"images": self._normalise(images)}
            return self._graph(fed, values, recipe, training=False)

    # State

    def read(self) -> State:
        """Return a copy of the state."""
        with self._explain_errors():
            return self._update.read()

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        self._update.write(state)

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        self._update.mask(masks)


class _SumOverRanks(mx.autograd.Function):  # type: ignore[misc]
    """A sum over all ranks that is differentiable: gradients are added up over ranks, too."""

    def __init__(self, world: MxnetWorld, name: str) -> None:
        super().__init__()
        self._world = world
        self._name = name

    def forward(self, array: Array) -> Array:
        # Not in the backward pass, which MXNet executes in a separate thread and at its own time.
        self._world.prepare(array, f"gradient of {self._name}")
        return self._sum(array, self._name)

    def backward(self, gradient: Array) -> Array:
        return self._sum(gradient, f"gradient of {self._name}")

    def _sum(self, array: Array, name: str) -> Array:
        array = array.copy()
        self._world.sum(array, name)
        return array


def _score(logits: Array, labels: Array) -> Array:
    """Return float64 [N, 5]: loss, rank of the right class, prediction, label, confidence."""
    known = mx.nd.maximum(labels, 0)
    losses = log_sum_exp(logits) - mx.nd.pick(logits, known)
    confidences = 1 / mx.nd.broadcast_sub(logits, logits.max(axis=1, keepdims=True)).exp().sum(
        axis=1
    )
    columns = [losses, _rank_labels(logits, known), logits.argmax(axis=1), labels, confidences]
    return mx.nd.stack(*(column.astype("float64") for column in columns), axis=1)


def _rank_labels(logits: Array, labels: Array) -> Array:
    """Return how many classes rank above the label: float32 [N]. Ties go to the lower class. NaN
    ranks first."""
    own = mx.nd.pick(logits, labels, keepdims=True)
    classes = mx.nd.arange(logits.shape[1], ctx=logits.context).reshape((1, -1))
    before = mx.nd.broadcast_lesser(classes, labels.astype("float32").reshape((-1, 1)))
    at_most = mx.nd.broadcast_lesser_equal(logits, own)
    equal = mx.nd.broadcast_equal(logits, own)
    return (1 - at_most + equal * before).sum(axis=1)


def _configure(recipe: Recipe, execution: Execution, world: MxnetWorld) -> None:
    if not world.on_gpu:
        if recipe.precision == "bf16" and "AVX-512" not in arithmetic().extensions:
            raise BackendError(
                "MXNet computes in bf16 only on processors with AVX-512; use --set precision=fp32"
            )
        keep_freed_memory()
        return
    # MXNet reads these variables when an operator first computes.
    os.environ["MXNET_ENFORCE_DETERMINISM"] = str(int(execution.deterministic))
    os.environ["MXNET_CUDNN_AUTOTUNE_DEFAULT"] = str(int(not execution.deterministic))
    os.environ["NVIDIA_TF32_OVERRIDE"] = str(int(recipe.precision == "tf32"))


def run_in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Do work that waits in a separate daemon thread, which does not keep the process from ending.

    It is the same thread for all work: MXNet keeps 5 MB for every thread that has called it, also
    after the thread's end.
    """
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    _work_queue().put(do)
    return future


@cache
def _work_queue() -> "SimpleQueue[Callable[[], None]]":
    """Return the queue of a thread that does what is put into it, in this order."""
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def go_on() -> None:
        while True:
            queue.get()()

    threading.Thread(target=go_on, name="lockstep-fetch", daemon=True).start()
    return queue
