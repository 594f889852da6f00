"""The training loops that Lockstep is compared with, as a careful user of PyTorch writes them.

Channels last, autocast with the loss inside it, a GradScaler for fp16, cuDNN's benchmark mode, one
static batch on the device that is already normalised, gradients set to None, and nothing read from
the device. With a compiler, it compiles model and loss together. The network is the same definition
as Lockstep's, a plain `torch.nn.Module`.
"""

from functools import partial
from itertools import product
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


class Loop:
    """A training loop on a static batch."""

    def __init__(self, recipe: Recipe, device: str, kind: str, optimizer: str) -> None:
        self.name = f"{kind}, {optimizer}"
        self._precision = recipe.precision
        self._device = device
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = recipe.precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = recipe.precision != "fp32"
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
        self._optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=1e-3,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            **OPTIMIZERS[optimizer],
        )
        self._scaler = torch.amp.GradScaler(device, enabled=recipe.precision == "fp16")

    def _compute_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = DTYPES.get(self._precision)
        with torch.autocast(self._device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self._criterion(self.model(images), labels)

    def compute_loss(self) -> Tensor:
        """Return the loss of the batch."""
        return self._loss(self._images, self._labels)

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            self._optimizer.zero_grad(set_to_none=True)
            self._scaler.scale(self.compute_loss()).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()


def measure(device: str, model: str, precision: str, batch: int, mode: str, tiny: int = 0) -> Rows:
    """Yield the rate of every loop; in the mode "profile", the trace of the compiled one. An error
    ends only the loop that it is about."""
    recipe = make_recipe(model, precision, batch, tiny=bool(tiny))
    same = {"model": model, "precision": precision, "batch": batch, "mode": mode}
    if mode == "profile":
        loop = Loop(recipe, device, "compile", "fused SGD")
        loop.run(8)
        yield {"what": "profile", "contender": loop.name} | same | trace_steps(loop.run, device, "")
        return
    kinds = ("eager", "traced") if tiny else MODES.get(mode, (mode,))
    for kind, optimizer in product(kinds, OPTIMIZERS):
        row = {"what": "train", "contender": f"{kind}, {optimizer}", "status": "ok"} | same
        try:
            loop = Loop(recipe, device, kind, optimizer)
            loop.run(4)  # a graph is captured, and kernels are chosen, in the first few steps
            steps = 2 if tiny else 50
            ms = measure_ms(partial(loop.run, steps), device, 1, warmup=0)
        except Exception as error:  # too little memory, or a compiler's own errors
            yield row | {"status": "failed", "reason": f"{type(error).__name__}: {error!s:.600}"}
        else:
            yield row | {"images_per_sec": 1000 * batch * steps / ms}


if __name__ == "__main__":
    print_rows(measure)
