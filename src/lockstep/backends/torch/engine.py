"""The training step on PyTorch: one code path for CPU and CUDA.

The layout is channels_last unless the execution asks for NCHW. Mixed precision is autocast over
float32 weights. `fetch`, `evaluate`, `predict`, `read` and `calibrate` wait for the device; `train`
only if it is some steps ahead of it.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.backends import Interval
from lockstep.backends.shared.batch_columns import name_columns
from lockstep.backends.shared.device import build_memory_error
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.backends.torch.compiled_step import pays_on_cpu, settle_cache
from lockstep.backends.torch.fused_batch_norm import fuse_batch_norms
from lockstep.backends.torch.handle import EndTimes, TorchHandle
from lockstep.backends.torch.inputs import Inputs
from lockstep.backends.torch.kernels import uses_update_kernel
from lockstep.backends.torch.losses import ImageLosses, mix_images
from lockstep.backends.torch.model import Model
from lockstep.backends.torch.update import Update
from lockstep.backends.torch.world import TorchWorld
from lockstep.data import Batch
from lockstep.models.metrics import Scores
from lockstep.models.state import State, check_fit
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.image_sizes import list_sizes
from lockstep.recipes.trained_tensors import frozen_norms, rate_factors
from lockstep.system.machine import arithmetic, share_of_cores

if TYPE_CHECKING:
    from lockstep.backends.torch.step_graph import Capturer, StepGraph

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self,
        recipe: Recipe,
        learning_rates: np.ndarray,
        world: TorchWorld,
        execution: Execution,
        capturer: "Capturer | None" = None,
    ) -> None:
        """Take what captures steps; None: what `execution` asks for."""
        self._recipe = recipe
        self._world = world
        self._device = world.torch_device
        self._parts = execution.accumulation_steps
        self._done = 0
        _configure(recipe, execution, self._device)
        self._spec = recipe.spec
        quantised = recipe.quantisation != "none"
        recompute = execution.recompute == "blocks"
        self.model: nn.Module = Model(
            self._spec, recipe, quantised=quantised, recompute=recompute
        ).to(self._device)
        layout = torch.contiguous_format if execution.layout == "nchw" else torch.channels_last
        self.model.to(memory_format=layout)  # type: ignore[call-overload]
        if recipe.batch_norm == "synchronised" and world.ranks > 1:
            from lockstep.backends.torch.batch_norm import synchronise

            self.model = synchronise(self.model, self._device)
        fuse_batch_norms(self.model, recipe, execution, self._device, world.ranks)
        self._frozen_norms = _freeze(self.model, recipe)
        self._tensors = canonical_tensors(self.model)
        self._loss_module = _TrainingLoss(self.model, recipe, layout).to(self._device)
        self._distributed = self._distribute(execution)
        self._steps = len(learning_rates)
        self._loss = self._compile(self._distributed or self._loss_module, execution)
        self._parameters = dict(self.model.named_parameters())
        is_fused = uses_update_kernel(recipe, execution, self._device)
        self._update = Update(
            recipe, self._parameters, self._tensors, learning_rates, self._device, is_fused=is_fused
        )
        self._scale = self._update.scale
        self._velocity = self._update.velocity
        self._ema = self._update.ema
        self._graph = self._make_graph(execution, capturer)
        self._inputs = Inputs(self._device)
        self._end_times = EndTimes()

    def __enter__(self) -> "TorchEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self._inputs.close()
        self._update.forget_gradients()
        self._forget_graph()
        # What it made refers to it: without this, memory would wait for Python's collector, and the
        # process group could not end.
        vars(self).clear()

    def _make_graph(self, execution: Execution, capturer: "Capturer | None") -> "StepGraph | None":
        """Return what takes steps by a graph; None on a CPU, where every step is computed as it
        is."""
        if capturer is None and not self._world.on_gpu and execution.cuda_graph != "on":
            return None
        from lockstep.backends.torch.step_graph import StepGraph, make_capturer

        capturer = capturer or make_capturer(execution, self._world)
        return StepGraph(self._compute, capturer, self._update.finish_capture)

    def _forget_graph(self) -> None:
        if self._graph is not None:
            self._graph.forget()

    def _distribute(self, execution: Execution) -> DistributedDataParallel | None:
        if self._world.ranks == 1:
            return None
        gpus = [self._device.index] if self._device.type == "cuda" else None
        distributed = DistributedDataParallel(
            self._loss_module,
            device_ids=gpus,
            gradient_as_bucket_view=True,
            bucket_cap_mb=execution.all_reduce_mb,
        )
        # Statistics stay local. Only those of rank 0 are used, and are broadcast before an
        # evaluation. This is set as an attribute, because the name of the argument depends on
        # PyTorch's version.
        distributed.broadcast_buffers = False
        if execution.all_reduce_precision != "fp32":
            distributed.register_comm_hook(_AUTOCAST[execution.all_reduce_precision], _reduce_in)
        return distributed

    def _compile(
        self, module: nn.Module, execution: Execution
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        if execution.compile == "off":
            return module
        pays = self._device.type == "cuda" or self._pays_on_cpu()
        if execution.compile != "on" and not pays:
            return module
        settle_cache()
        # Compiled once for each size of images: for sizes that it does not know, PyTorch makes
        # slower code from the second size on, and none at all after eight.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, 2 * len(list_sizes(self._recipe)))
        return torch.compile(module, dynamic=False)

    def _pays_on_cpu(self) -> bool:
        return pays_on_cpu(
            self._recipe,
            self._steps // self._recipe.epochs,
            ranks=self._world.ranks,
            cores=share_of_cores(),
            arithmetic=arithmetic(),
            environment=os.environ,
        )

    def train(self, batches: Iterable[Batch], first: int) -> TorchHandle:
        """Enqueue one optimizer step for every batch, numbered from `first`."""
        _set_training_mode(self.model, self._frozen_norms)
        self._update.begin(first)
        sums = []
        take_step = self._graph or self._compute
        images = self._recipe.global_batch_images // self._world.ranks
        with self._world.explain_errors():
            try:
                for step, (batch, columns) in enumerate(self._inputs.upload(batches), first):
                    images = len(batch.labels)
                    sums.append(take_step(columns))
                    self._done = step + 1
            except RuntimeError as error:
                if not _is_lack_of_memory(error):
                    raise
                raise build_memory_error(images, self._parts, str(error)) from None
            return self._handle(first, sums)

    def _handle(self, first: int, sums: list[Tensor]) -> TorchHandle:
        table = (
            torch.stack(sums)
            if sums
            else torch.zeros(0, 4, dtype=torch.float64, device=self._device)
        )
        if self._world.ranks > 1 and sums:
            dist.all_reduce(table)
        # Copied directly after these steps: `fetch` is called when more steps are enqueued, and
        # must not wait for those.
        sums_on_host = self._copy_to_host(table)
        scale = self._copy_to_host(self._scale.value)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event(enable_timing=True, blocking=True)
            done.record()
        return TorchHandle(first, sums_on_host, scale, done, time.perf_counter())

    def _compute(self, columns: Sequence[Tensor]) -> Tensor:
        """Take a step on the columns of a batch on the device (`Inputs.upload`), and return the
        sums of `_TrainingLoss`."""
        self._update.forget_gradients()  # those of a step that failed
        sums = []
        for part, inputs in enumerate(
            zip(*(column.chunk(self._parts) for column in columns), strict=True)
        ):
            last = part == self._parts - 1
            with nullcontext() if last else self._without_reduction():
                loss, part_sums = self._loss(*inputs)
                (loss * (self._scale.value / self._parts)).backward()
            sums.append(part_sums)
        is_captured = self._graph is not None and self._graph.is_capturing
        self._update.apply(is_captured=is_captured)
        return sums[0] if self._parts == 1 else torch.stack(sums).sum(dim=0)

    def _without_reduction(self) -> Any:
        return self._distributed.no_sync() if self._distributed is not None else nullcontext()

    def _copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host that has its values when the device has done its work until
        here."""
        if self._device.type == "cpu":
            return tensor.clone()
        # Into pinned memory: a copy into other memory makes the host wait for all that is enqueued.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    def fetch(self, handle: TorchHandle) -> Interval:
        """Wait for the steps and return their results over all ranks."""
        finished_at = handle.enqueued_at
        if handle.done is not None:
            finished_at = self._end_times.wait(handle.done)
        return Interval.from_table(
            handle.first, handle.sums.numpy(), float(handle.loss_scale), finished_at
        )

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding, of all ranks."""
        with self._world.explain_errors():
            return self._evaluate(batches, ema, with_logits)

    @torch.inference_mode()
    def _evaluate(self, batches: Iterable[Batch], ema: bool, with_logits: bool) -> Scores:
        if self._world.ranks > 1:
            averages = [t for name, t in self._ema.items() if name not in self._parameters]
            for statistic in (*self.model.buffers(), *averages):
                dist.broadcast(statistic, src=0)
        self.model.eval()
        recipe = self._recipe.evaluation_recipe()
        width = 5 + recipe.logits * with_logits
        rows = [torch.zeros(0, width, dtype=torch.float64, device=self._device)]
        for _, (images, labels, *_) in self._inputs.upload(batches):
            logits = self._logits(images, recipe, ema=ema)
            if recipe.eval_flips:
                logits = (logits + self._logits(images.flip(2), recipe, ema=ema)) / 2
            known = labels.clamp(min=0)
            losses = F.cross_entropy(logits, known, reduction="none")
            confidences = 1 / (logits - logits.amax(dim=1, keepdim=True)).exp().sum(dim=1)
            columns = [
                losses,
                _rank_labels(logits, known),
                logits.argmax(dim=1),
                labels,
                confidences,
            ]
            scores = torch.stack(columns, dim=1)
            rows.append(torch.cat([scores, logits], dim=1) if with_logits else scores)
        table = torch.cat(rows)
        if self._world.ranks > 1:
            parts = [torch.empty_like(table) for _ in range(self._world.ranks)]
            dist.all_gather(parts, table)
            table = torch.cat(parts)
        return Scores.unpack_table(table.cpu().numpy())

    @torch.inference_mode()
    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        self.model.eval()
        return self._logits(self._inputs.put(images), self._recipe).cpu().numpy()

    @torch.inference_mode()
    def predict_in_training(self, images: np.ndarray) -> np.ndarray:
        """Return what `predict` would if batch norm were in training: it has the statistics of
        these images. The running ones change."""
        self.model.train()
        return self._logits(self._inputs.put(images), self._recipe).cpu().numpy()

    def _logits(self, images: Tensor, recipe: Recipe, *, ema: bool = False) -> Tensor:
        """Return float32 logits in the recipe's precision."""
        normalised = self._loss_module.normalise(images)
        with autocast(recipe, self._device):
            if ema:
                return torch.func.functional_call(self.model, self._ema, (normalised,)).float()
            return self.model(normalised).float()

    @torch.inference_mode()
    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the largest magnitude of the input of every quantised layer, over all images."""
        from lockstep.backends.torch.quantisation import largest_inputs
        from lockstep.models.quantisation import layers

        plain = Model(self._spec, self._recipe).to(self._device).eval()
        for name, tensor in canonical_tensors(plain).items():
            tensor.copy_(self._tensors[name])
        images = (
            self._loss_module.normalise(columns[0]) for _, columns in self._inputs.upload(batches)
        )
        with autocast(self._recipe, self._device):
            return largest_inputs(plain, layers(self._spec), images)

    def quantise(self, scales: Mapping[str, float]) -> None:
        """Quantise the inputs of layers with these scales from here on."""
        from lockstep.backends.torch.quantisation import set_scales
        from lockstep.models.quantisation import check_scales

        check_scales(self._spec, scales)
        set_scales(self.model, scales)

    def read(self) -> State:
        """Return a copy of the state."""
        return State(
            step=self._done,
            tensors=_copy_to_numpy(self._tensors),
            momentum=_copy_to_numpy(self._velocity),
            ema=_copy_to_numpy(self._ema),
            scaler=self._scale.read(),
            second_moments=_copy_to_numpy(self._update.second_moments),
        )

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        copy_into(self._tensors, state.tensors, "tensors")
        copy_into(self._velocity, state.momentum, "momentum")
        copy_into(self._ema, state.ema, "moving averages")
        copy_into(self._update.second_moments, state.second_moments, "second moments")
        self._scale.write(state.scaler)
        self._done = state.step
        self._update.apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        self._forget_graph()
        self._update.mask(masks)


def _freeze(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    """Turn off the gradients of a model's frozen parameters. Return its frozen batch norms.

    Nothing is computed backwards below the lowest trained tensor, and the activations there are not
    kept.
    """
    trained = rate_factors(recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return [model.get_submodule(name) for name in frozen_norms(recipe)]


def _set_training_mode(model: nn.Module, frozen: Iterable[nn.Module]) -> None:
    """Set a model to training mode, and its frozen batch norms to evaluation mode, in which they
    compute with their running statistics and leave them as they are."""
    model.train()
    for norm in frozen:
        norm.eval()


class _TrainingLoss(nn.Module):
    """The compiled part of a step: uint8 images to loss and sums."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, recipe: Recipe, layout: torch.memory_format) -> None:
        super().__init__()
        self.model = model
        self._recipe = recipe
        self._layout = layout
        self.register_buffer("mean", torch.tensor(recipe.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(recipe.std).view(1, 3, 1, 1), persistent=False)
        self._losses = ImageLosses(recipe)

    def normalise(self, images: Tensor) -> Tensor:
        """Return uint8 images [N, H, W, 3] as float32 [N, 3, H, W], (x - mean) / std, in the
        engine's layout."""
        return (
            images.permute(0, 3, 1, 2).float().contiguous(memory_format=self._layout) - self.mean
        ) / self.std

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        *columns: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss and float64 [4]: loss sum, top-1, top-5, images.

        `columns` are in the order of `list_columns`.
        """
        x = self.normalise(images)
        named = name_columns(self._recipe, columns)
        target: tuple[Tensor, ...] = ()
        if named.partners is not None:
            x = mix_images(x, named.coefficients, named.partners, named.boxes)
            target = (named.target_coefficients, named.partners)
        with autocast(self._recipe, images.device):
            logits = self.model(x, named.kept_features, named.kept_blocks)
        logits = logits.float()
        losses = self._losses(logits, labels, *target)
        with torch.no_grad():
            rank = _rank_labels(logits, labels)
            count = torch.full_like(losses, 1.0)
            sums = torch.stack([losses, rank < 1, rank < 5, count], dim=1).double().sum(dim=0)
        return losses.mean(), sums


def _rank_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes rank above the label: int64 [N]. Ties go to the lower class. NaN
    ranks first."""
    own = logits.gather(1, labels[:, None])
    before = torch.arange(logits.shape[1], device=logits.device)[None] < labels[:, None]
    return (~(logits <= own) | ((logits == own) & before)).sum(dim=1)


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Return a context that computes in the recipe's mixed precision."""
    mixed = recipe.precision in _AUTOCAST
    return torch.autocast(
        device.type, dtype=_AUTOCAST.get(recipe.precision, torch.bfloat16), enabled=mixed
    )


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and batch norm statistics by canonical name."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def _copy_to_numpy(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: t.detach().cpu().contiguous().numpy().copy() for name, t in tensors.items()}


@torch.no_grad()
def copy_into(into: dict[str, Tensor], values: dict[str, np.ndarray], what: str) -> None:
    """Copy arrays into tensors of the same names and shapes. Raises `CheckpointError` if names or
    shapes differ."""
    check_fit({name: tuple(tensor.shape) for name, tensor in into.items()}, values, what)
    for name, tensor in into.items():
        tensor.copy_(torch.tensor(values[name], dtype=torch.float32))


def _reduce_in(
    dtype: torch.dtype,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket of gradients over all ranks, which are sent in `dtype`.

    PyTorch's own function for bf16 refuses gloo.
    """
    sent = bucket.buffer().to(dtype).div_(dist.get_world_size())
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _is_lack_of_memory(error: RuntimeError) -> bool:
    """Return whether memory is short. On a CPU, PyTorch raises a plain `RuntimeError`, which its
    text identifies."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _configure(recipe: Recipe, execution: Execution, device: torch.device) -> None:
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        # Otherwise cuBLAS may sum in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(execution.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = execution.deterministic
    torch.backends.cudnn.benchmark = not execution.deterministic
    torch.backends.cudnn.allow_tf32 = recipe.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "tf32"
