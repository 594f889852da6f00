"""Contenders that take training steps: Lockstep's engine, and loops of PyTorch alone."""

from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import backends
from lockstep.backends.torch.model import Model
from lockstep.benchmark.step_process import noise
from lockstep.models.architectures import model_spec
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state

HOW = {
    "plain": {"deterministic": False},
    "deterministic": {"deterministic": True},
    "fused": {"deterministic": False, "fused": "on"},
    "graph": {"deterministic": False, "cuda_graph": "on"},
}
"""Settings of Lockstep's engine by contender. `plain` has kernels that may sum in any order, as the
loops have that it is compared with. Its rate decides what `fused: auto` and `cuda_graph: auto` do.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EAGER = "eager"
COMPILERS: dict[str, dict[str, Any]] = {
    "compile": {},
    "max-autotune": {"mode": "max-autotune"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "traced": {"backend": "eager"},
}
"""Arguments of `torch.compile`, by name. "traced" only traces: it shows on a CPU, within seconds,
that a loop runs."""
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {}, "fused SGD": {"fused": True}}


class Lockstep:
    """Lockstep's engine on a held batch of noise."""

    def __init__(self, recipe: Recipe, device: str, kind: str) -> None:
        how = {"backend": "torch", "device": device} | HOW[kind]
        execution = Execution.of(how | {"compile": "off" if device == "cpu" else "auto"})
        self.is_deterministic = execution.deterministic
        backend = backends.load("torch")
        world = backend.world(execution)
        self.engine = backend.engine(recipe, np.full(100_000, 1e-3), world, execution)
        self.engine.write(initial_state(recipe))
        self._batch = replace(next(noise(recipe, 1)), is_held=True)
        self._step = 0

    def begin(self, steps: int) -> Any:
        """Take steps; return what `fetch` takes when `train` returns."""
        handle = self.engine.train(repeat(self._batch, steps), self._step)
        self._step += steps
        return handle

    def run(self, steps: int) -> None:
        """Take steps and fetch their sums."""
        self.engine.fetch(self.begin(steps))


class Network:
    """Lockstep's network as a plain `torch.nn.Module`, and its loss of a static batch. Loops with
    different optimizers share it, so that it is compiled once."""

    def __init__(self, recipe: Recipe, device: str, kind: str) -> None:
        self.recipe = recipe
        self.device = device
        torch.manual_seed(0)
        self.model: nn.Module = Model(model_spec(recipe.model), recipe).to(device).train()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        shape = (recipe.global_batch_images, 3, recipe.image_size, recipe.image_size)
        images = torch.randn(shape, device=device)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(0, recipe.logits, shape[:1], device=device)
        self._criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        self._loss = self._compute_loss
        if kind != EAGER:
            self._loss = torch.compile(self._compute_loss, **COMPILERS[kind])

    def _compute_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = DTYPES.get(self.recipe.precision)
        with torch.autocast(self.device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self._criterion(self.model(images), labels)

    def compute_loss(self) -> Tensor:
        """Return the loss of the batch."""
        return self._loss(self._images, self._labels)


class Loop:
    """A training loop with one of `OPTIMIZERS`, as a careful user of PyTorch writes it.

    Channels last, autocast with the loss inside it, a GradScaler for fp16, cuDNN's benchmark mode,
    one static batch on the device that is already normalised, gradients set to None, and nothing
    read from the device. With a compiler, it compiles model and loss together.
    """

    is_deterministic = False

    def __init__(self, network: Network, optimizer: str) -> None:
        self._network = network
        recipe = network.recipe
        self._optimizer = torch.optim.SGD(
            network.model.parameters(),
            lr=1e-3,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            **OPTIMIZERS[optimizer],
        )
        self._scaler = torch.amp.GradScaler(network.device, enabled=recipe.precision == "fp16")

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            self._optimizer.zero_grad(set_to_none=True)
            self._scaler.scale(self._network.compute_loss()).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()


Contender = Lockstep | Loop


def build_contenders(recipe: Recipe, device: str, kind: str) -> dict[str, Contender]:
    """Return an engine of Lockstep, or the loops of a network, after some steps: in the first few
    ones kernels are chosen and graphs captured."""
    contenders: dict[str, Contender] = {}
    if kind in HOW:
        contenders[kind] = Lockstep(recipe, device, kind)
    else:
        network = Network(recipe, device, kind)
        for optimizer in OPTIMIZERS:
            contenders[f"{kind}, {optimizer}"] = Loop(network, optimizer)
    for contender in contenders.values():
        select_kernels(contender, device)
        contender.run(4)
    return contenders


def select_kernels(contender: Contender, device: str) -> None:
    """Set PyTorch's switches as the contender wants them: the process has one of each."""
    if device == "cuda":
        torch.use_deterministic_algorithms(contender.is_deterministic, warn_only=True)
    torch.backends.cudnn.deterministic = contender.is_deterministic
    torch.backends.cudnn.benchmark = not contender.is_deterministic
