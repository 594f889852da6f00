"""The training loops that Lockstep is compared with, as a careful user of PyTorch writes them.

Channels last, autocast with the loss inside it, a GradScaler for fp16, cuDNN's benchmark mode, one
static batch on the device that is already normalised, gradients set to None, and nothing read from
the device. With a compiler, it compiles model and loss together. The network is the same definition
as Lockstep's, a plain `torch.nn.Module`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.steps import Rows, make_recipe, measure_ms, print_rows, trace_steps
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
MODES = {"default": (EAGER, "compile")}
"""The kinds of networks of a mode; by default one, of the mode's name."""
SECONDS = 5.0


class Network:
    """A network with its loss in mixed precision, compiled or not. Loops with different optimizers
    share it."""

    def __init__(self, recipe: Recipe, device: str, kind: str) -> None:
        self.recipe = recipe
        self.device = device
        self.kind = kind
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = recipe.precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = recipe.precision != "fp32"
        torch.manual_seed(0)
        self.model: nn.Module = Model(model_spec(recipe.model), recipe).to(device).train()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        size = recipe.image_size
        images = torch.randn(recipe.global_batch_images, 3, size, size, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, recipe.logits, (len(images),), device=device)
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


def measure(device: str, model: str, precision: str, batch: int, mode: str, tiny: int = 0) -> Rows:
    """Yield the rate of every loop; in the mode "profile", the trace of the compiled one. An error
    ends only the loop that it is about."""
    recipe = make_recipe(model, precision, batch, tiny=bool(tiny))
    same = {"model": model, "precision": precision, "batch": batch, "mode": mode}
    if mode == "profile":
        loop = Loop(Network(recipe, device, "compile"), "fused SGD")
        loop.run(8)
        yield {"what": "profile", "contender": loop.name} | same | trace_steps(loop.run, device, "")
        return
    for kind in ("eager", "traced") if tiny else MODES.get(mode, (mode,)):
        network = Network(recipe, device, kind)
        for optimizer in OPTIMIZERS:
            loop = Loop(network, optimizer)
            row = {"what": "train", "contender": loop.name, "status": "ok"} | same
            try:
                rate = batch / _measure_step_sec(loop, device)
            except Exception as error:  # too little memory, or a compiler's own errors
                yield row | {
                    "status": "failed",
                    "reason": f"{type(error).__name__}: {error!s:.600}",
                }
            else:
                yield row | {"images_per_sec": rate}


def _measure_step_sec(loop: Loop, device: str) -> float:
    loop.run(4)  # a graph is captured, and kernels are chosen, in the first few steps
    steps = 2
    if device == "cuda":
        steps += round(1000 * SECONDS / measure_ms(lambda: loop.run(1), device, 1))
    return measure_ms(lambda: loop.run(steps), device, 1, warmup=0) / 1000 / steps


if __name__ == "__main__":
    print_rows(measure)
