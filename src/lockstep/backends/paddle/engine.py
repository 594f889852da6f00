"""The training step on Paddle: forward and backward as a program, the update on three vectors.

One vector holds all tensors of the model. Velocities and averages have one vector each, too. The
update, the sum over ranks and the moving average are thus a few operations on whole vectors, and
the model has views of them. The layout is NCHW on a CPU, where oneDNN computes, and NHWC on a GPU.
Only `fetch`, `evaluate`, `predict` and `read` wait for the device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from lockstep.backends import Interval
from lockstep.backends.paddle.losses import ImageLosses, mix_images
from lockstep.backends.paddle.model import COMPUTED_IN, Pass
from lockstep.backends.paddle.program import Compiled, Outputs, Tensors
from lockstep.backends.paddle.update import Update
from lockstep.backends.paddle.world import PaddleWorld, Tensor
from lockstep.backends.shared.device import build_memory_error
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.backends.shared.layout import Layout
from lockstep.data import Batch, LentImages
from lockstep.models.metrics import Scores
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.stochastic_depth import branch_factors
from lockstep.system.errors import BackendError


@dataclass(frozen=True)
class PaddleHandle:
    """Steps that were enqueued, and where on the host their sums will be."""

    first: int
    table: Tensor
    """float64 [steps, 5], valid once `done`: loss sum, top-1, top-5 and images of all ranks, and
    the final loss scale."""
    done: Any
    """An event on a GPU; None on a CPU, where enqueued work is already done."""
    enqueued_at: float

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.table)

    @property
    def ready(self) -> bool:
        """Whether the steps are done, so that `fetch` does not wait."""
        return self.done is None or self.done.query()


Function = Callable[[Tensors], Outputs]
"""A computation on the engine's tensors."""


class PaddleEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self, recipe: Recipe, learning_rates: np.ndarray, world: PaddleWorld, execution: Execution
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._parts = execution.accumulation_steps
        self._all_reduce_mb = execution.all_reduce_mb
        self._sent = COMPUTED_IN.get(execution.all_reduce_precision, "float32")
        _configure(recipe, execution, world)
        self._synchronised = recipe.batch_norm == "synchronised" and world.ranks > 1
        if self._synchronised and execution.compile == "on":
            raise BackendError(
                "a Paddle program has no batch norm over all ranks; leave compile at auto"
            )
        self._layout = layout = Layout(recipe)
        self._update = Update(recipe, layout, learning_rates)
        self._scale = self._update.scale
        self._values = self._update.values
        self._ema = self._update.ema
        self._views = layout.views(self._values)
        self._ema_views = {} if self._ema is None else layout.views(self._ema)
        for name in layout.trained:
            self._views[name].stop_gradient = False
        self._mean = paddle.to_tensor(list(recipe.mean), dtype="float32")
        self._std = paddle.to_tensor(list(recipe.std), dtype="float32")
        self._losses = ImageLosses(recipe)
        self._held: tuple[np.ndarray, Tensor] | None = None
        self._borrower = Borrower(on_gpu=world.on_gpu)
        compiled = execution.compile == "on" or (
            execution.compile == "auto" and not self._synchronised
        )
        onednn = compiled and not world.on_gpu
        self._gradients_of_part, self._logits, self._evaluated = self._functions(compiled, onednn)

    def __enter__(self) -> "PaddleEngine":
        return self

    def __exit__(self, *error: object) -> None:
        vars(self).clear()  # as in the PyTorch backend

    # Training

    def _functions(self, compiled: bool, onednn: bool) -> tuple[Function, Function, Function]:
        """Return the functions for a part of a step, logits, and logits of an evaluation.

        They are programs if `compiled`, else they compute operation by operation.
        """

        def gradients(inputs: Tensors) -> Outputs:
            return self._forward_and_back(
                inputs, paddle.static.gradients if compiled else _gradients, onednn
            )

        def logits(recipe: Recipe, inputs: Tensors) -> Outputs:
            run = Pass(recipe, inputs, training=False, on_gpu=self._world.on_gpu, onednn=onednn)
            return [run.logits(inputs["images"])]

        def build_program(function: Function, *, keeps_one: bool = False) -> Function:
            return Compiled(function, onednn=onednn, keeps_one=keeps_one) if compiled else function

        predicted = build_program(partial(logits, self._recipe))
        exact = self._recipe.evaluation_recipe()
        evaluated = predicted if exact == self._recipe else build_program(partial(logits, exact))
        # A program keeps memory. That of the size of images before is not needed again.
        return build_program(gradients, keeps_one=True), predicted, evaluated

    def train(self, batches: Iterable[Batch], first: int) -> PaddleHandle:
        """Enqueue one optimizer step for every batch, numbered from `first`."""
        rows = []
        for step, batch in enumerate(batches, first):
            try:
                gradient, sums = self._gradient(batch)
            except MemoryError as error:
                raise build_memory_error(len(batch.labels), self._parts, _reason(error)) from None
            self._update.apply(self._add_up(gradient), step)
            rows.append(sums)
        table = paddle.zeros([0, 4], dtype="float64")
        if rows:
            table = self._world.sum(paddle.stack(rows).reshape([-1])).reshape([-1, 4])
        scale = self._scale.value.cast("float64").expand([len(rows), 1])
        return self._copy_to_host(first, paddle.concat([table, scale], axis=1))

    def _add_up(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over all ranks, which is sent in `all_reduce_precision`."""
        if self._world.ranks == 1 or self._sent == "float32":
            return self._world.sum(gradient, self._all_reduce_mb)
        return self._world.sum(gradient.cast(self._sent), self._all_reduce_mb).cast("float32")

    def _copy_to_host(self, first: int, table: Tensor) -> PaddleHandle:
        if not self._world.on_gpu:
            return PaddleHandle(first, table, None, time.perf_counter())
        on_host = table._copy_to(paddle.CUDAPinnedPlace(), False)  # without waiting
        done = paddle.device.cuda.Event()
        done.record(paddle.device.cuda.current_stream())
        return PaddleHandle(first, on_host, done, time.perf_counter())

    def _gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient of scale / ranks * (mean loss) with respect to the trained
        parameters, added up over the parts, and the sums.

        Running statistics are updated.
        """
        gradient = None
        sums = None
        size = len(batch.labels) // self._parts
        images = self._images(batch)
        labels = paddle.to_tensor(batch.labels, dtype="int64")
        for part in range(self._parts):
            rows = slice(part * size, (part + 1) * size)
            x = self._normalise(images[rows])
            x = mix_images(x, batch, rows, channels_last=self._world.on_gpu)
            own = labels[rows]
            factor = self._scale.value / (size * self._parts * self._world.ranks)
            inputs = {"images": x, "factor": factor} | self._losses.make_inputs(own, batch, rows)
            if batch.kept_features is not None:
                factors = batch.kept_features[rows] / np.float32(1 - self._recipe.dropout)
                inputs["feature_factors"] = paddle.to_tensor(factors)
            if batch.kept_blocks is not None:
                factors = branch_factors(self._recipe, batch.kept_blocks[rows])
                inputs["branch_factors"] = paddle.to_tensor(factors)
            logits, *results = self._gradients_of_part(inputs | self._views)
            # Joined here and not in the program, where oneDNN's kernels fail on some shapes.
            count = len(self._layout.trained)
            part_gradient = _join(results[:count])
            if self._layout.statistics:
                moved = _join(results[count:])
                statistics = self._values[self._layout.moving_place]
                statistics.add_(self._recipe.bn_momentum * (moved - statistics))
            losses = self._losses.compute(logits, inputs)
            rank = _rank_labels(logits, own)
            columns = [losses, rank < 1, rank < 5, paddle.ones_like(losses)]
            counted = paddle.stack([column.cast("float64").sum() for column in columns])
            gradient = part_gradient if gradient is None else gradient.add_(part_gradient)
            sums = counted if sums is None else sums + counted
        return gradient, sums

    def _forward_and_back(
        self, inputs: Tensors, differentiate: Callable[..., list[Tensor]], onednn: bool
    ) -> Outputs:
        """Return logits, the gradients of `factor` times the sum of losses, and the batch's
        statistics."""
        moments = self._moments if self._synchronised else None
        on_gpu = self._world.on_gpu
        run = Pass(
            self._recipe, inputs, training=True, on_gpu=on_gpu, moments=moments, onednn=onednn
        )
        logits = run.logits(
            inputs["images"], inputs.get("feature_factors"), inputs.get("branch_factors")
        )
        of_logits = self._losses.slope(logits.detach(), inputs) * inputs["factor"]
        trained = [inputs[name] for name in self._layout.trained]
        gradients = differentiate([logits], [*trained, *run.required], [of_logits])
        return [
            logits.detach(),
            *gradients[: len(trained)],
            *(run.statistics[name] for name in self._layout.statistics),
        ]

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return mean and variance, in float32, over the images of all ranks."""
        x = x.cast("float32")
        axes, shape = [0, 2, 3], [1, -1, 1, 1]
        if self._world.on_gpu:
            axes, shape = [0, 1, 2], [1, 1, 1, -1]
        sums = x.sum(axes)
        count = x.size // sums.size * self._world.ranks
        mean = _SumOverRanks.apply(sums, self._world) / count
        variance = (
            _SumOverRanks.apply((x - mean.reshape(shape)).square().sum(axes), self._world) / count
        )
        return mean, variance, count

    def _images(self, batch: Batch) -> Tensor:
        if not isinstance(batch.images, np.ndarray):
            return self._borrower.copy(batch.images)
        if not batch.is_held:
            return paddle.to_tensor(batch.images)
        if self._held is None or self._held[0] is not batch.images:
            self._held = batch.images, paddle.to_tensor(batch.images)
        return self._held[1]

    def _normalise(self, images: Tensor) -> Tensor:
        """Return uint8 images [N, H, W, 3] as float32, (x - mean) / std, in the device's layout."""
        x = (images.cast("float32") - self._mean) / self._std
        return x if self._world.on_gpu else x.transpose([0, 3, 1, 2])

    def fetch(self, handle: PaddleHandle) -> Interval:
        """Wait for the steps and return their results over all ranks."""
        if handle.done is not None:
            handle.done.synchronize()
        finished_at = handle.enqueued_at if handle.done is None else time.perf_counter()
        table = handle.table.numpy()
        loss_scale = float(table[-1, 4]) if len(table) else self._scale.value.item()
        return Interval.from_table(handle.first, table, loss_scale, finished_at)

    # Inference

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks."""
        for vector in (self._values, self._ema):
            if vector is not None:  # evaluation uses the statistics of rank 0
                vector[self._layout.count :].copy_(
                    self._world.share(vector[self._layout.count :].clone()), True
                )
        width = 5 + self._recipe.logits * with_logits
        rows = [paddle.zeros([0, width], dtype="float64")]
        for batch in batches:
            views = self._ema_views if ema else self._views
            images = self._normalise(self._images(batch))
            (logits,) = self._evaluated({"images": images} | views)
            if self._recipe.eval_flips:
                own = logits.clone()  # the next call writes where this result is
                mirrored = images.flip(2 if self._world.on_gpu else 3)
                (logits,) = self._evaluated({"images": mirrored} | views)
                logits = (own + logits) / 2
            scores = _score(logits, paddle.to_tensor(batch.labels, dtype="int64"))
            if with_logits:
                scores = paddle.concat([scores, logits.cast("float64")], axis=1)
            rows.append(scores)
        own = paddle.concat(rows)
        before = self._world.rank * len(own)
        after = (self._world.ranks - 1 - self._world.rank) * len(own)
        padded = [
            paddle.zeros([before, width], dtype="float64"),
            own,
            paddle.zeros([after, width], dtype="float64"),
        ]
        table = self._world.sum(paddle.concat(padded).reshape([-1])).numpy().reshape(-1, width)
        return Scores.unpack_table(table)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        if len(images) == 0:
            return np.zeros((0, self._recipe.logits), np.float32)
        (logits,) = self._logits(
            {"images": self._normalise(paddle.to_tensor(images))} | self._views
        )
        return logits.numpy()

    # State

    def read(self) -> State:
        """Return a copy of the state."""
        return self._update.read()

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        self._update.write(state)

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        self._update.mask(masks)


class _SumOverRanks(PyLayer):  # type: ignore[misc]
    """A sum over all ranks that is differentiable: gradients are added up over ranks, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: PaddleWorld) -> Tensor:
        ctx.world = world
        return world.sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.world.sum(gradient.clone())


def _gradients(
    outputs: list[Tensor], inputs: list[Tensor], of_outputs: list[Tensor]
) -> list[Tensor]:
    return paddle.grad(outputs, inputs, of_outputs)


def _join(tensors: list[Tensor]) -> Tensor:
    return paddle.concat([tensor.reshape([-1]) for tensor in tensors])


def _score(logits: Tensor, labels: Tensor) -> Tensor:
    """Return float64 [N, 5]: loss, rank of the right class, prediction, label, confidence."""
    known = labels.clip(min=0)
    losses = paddle.logsumexp(logits, axis=1) - paddle.take_along_axis(
        logits, known.unsqueeze(1), axis=1
    ).squeeze(1)
    confidences = 1 / (logits - logits.max(axis=1, keepdim=True)).exp().sum(axis=1)
    columns = [losses, _rank_labels(logits, known), logits.argmax(axis=1), labels, confidences]
    return paddle.stack([column.cast("float64") for column in columns], axis=1)


def _rank_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes rank above the label: int64 [N]. Ties go to the lower class. NaN
    ranks first."""
    own = paddle.take_along_axis(logits, labels.unsqueeze(1), axis=1)
    before = paddle.arange(logits.shape[1]).unsqueeze(0) < labels.unsqueeze(1)
    comes_first = ~(logits <= own) | ((logits == own) & before)
    return comes_first.cast("int64").sum(axis=1)


def _reason(error: MemoryError) -> str:
    """Return the line of Paddle's error that says how much memory is missing. Around it are hints
    and places in its code."""
    lines = str(error).strip().splitlines() or ["none is left"]
    return next((line for line in lines if "memory" in line.lower()), lines[-1])


def _configure(recipe: Recipe, execution: Execution, world: PaddleWorld) -> None:
    if not world.on_gpu:
        keep_freed_memory()
        return
    paddle.set_flags(
        {
            "FLAGS_cudnn_deterministic": execution.deterministic,
            "FLAGS_cudnn_exhaustive_search": not execution.deterministic,
            "FLAGS_allow_tf32_cublas": recipe.precision == "tf32",
            "FLAGS_allow_tf32_cudnn": recipe.precision == "tf32",
        }
    )


_CPU = 1
_CUDA = 2
"""DLPack's types of these devices."""


class Borrower:
    """Copies lent images to an engine's device. On a GPU the host does not wait for the copy."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._lent: deque[tuple[Any, Tensor]] = deque()
        """Images that are being copied, with the event that follows the copy. They keep the
        loader's memory."""

    def copy(self, images: LentImages) -> Tensor:
        """Return a copy of images on the device."""
        if images.__dlpack_device__()[0] != (_CUDA if self._on_gpu else _CPU):
            return paddle.to_tensor(np.asarray(images))
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        lent = paddle.utils.dlpack.from_dlpack(images.__dlpack__())
        copy = lent.clone()
        if self._on_gpu:
            done = paddle.device.cuda.Event()
            done.record(paddle.device.cuda.current_stream())
            self._lent.append((done, lent))
        return copy
