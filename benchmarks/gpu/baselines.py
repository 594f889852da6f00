"""The training loops that Lockstep is compared with, as a careful user of PyTorch writes them.

Channels last, autocast with the loss inside it, a GradScaler for fp16, cuDNN's benchmark mode, one
static batch on the device that is already normalised, gradients set to None, and nothing read from
the device. With a compiler, it compiles model and loss together. The network is the same definition
as Lockstep's, a plain `torch.nn.Module`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.switches import Switches
from lockstep.backends.torch.model import Model
from lockstep.models.architectures import model_spec
from lockstep.recipes import Recipe

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


class Network:
    """A network with its loss in mixed precision, compiled or not. Loops with different optimizers
    share it."""

    def __init__(self, recipe: Recipe, batch: int, device: str, kind: str) -> None:
        self.recipe = recipe
        self.batch = batch
        self.device = device
        self.kind = kind
        self.switches = Switches.of_a_careful_user(recipe.precision)
        self.switches.set()
        torch.manual_seed(0)
        model = Model(model_spec(recipe.model), recipe).to(device)
        self.model: nn.Module = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        size = recipe.image_size
        images = torch.randn(batch, 3, size, size, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, recipe.logits, (batch,), device=device)
        self._criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        self.loss = self._loss if kind == EAGER else torch.compile(self._loss, **COMPILERS[kind])

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = DTYPES.get(self.recipe.precision)
        with torch.autocast(self.device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self._criterion(self.model(images), labels)


class Loop:
    """A training loop with one of `OPTIMIZERS`."""

    def __init__(self, network: Network, optimizer: str) -> None:
        self.name = f"{network.kind}, {optimizer}"
        self.images = network.batch
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

    def prepare(self) -> None:
        """Set the process's switches, as a careful user does."""
        self._network.switches.set()

    def run(self, steps: int) -> None:
        """Take steps on the static batch."""
        network = self._network
        for _ in range(steps):
            if network.kind in ("max-autotune", "reduce-overhead"):
                torch.compiler.cudagraph_mark_step_begin()
            self._optimizer.zero_grad(set_to_none=True)
            loss = network.loss(network.images, network.labels)
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()
