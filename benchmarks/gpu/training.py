"""Training steps: the rates of contenders, which alternate in one process so that a drift of clock
or heat reaches all of them; and traces. Contenders are Lockstep's engine and loops of PyTorch."""

import gzip
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.rows import Rows, make_recipe, measure_ms, print_rows, wait
from benchmarks.measuring import engine
from lockstep.backends.torch.instruments import profile
from lockstep.backends.torch.model import Model
from lockstep.benchmark.step_process import noise
from lockstep.recipes import Execution, Recipe

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
COMPILERS: dict[str, dict[str, Any]] = {
    "compile": {},
    "max-autotune": {"mode": "max-autotune"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "traced": {"backend": "eager"},
}
"""Arguments of `torch.compile`, by name. "traced" only traces: it shows on a CPU, within seconds,
that a loop runs."""
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {}, "fused SGD": {"fused": True}}
MODES = {
    "default": ("plain", "eager", "compile"),
    "engines": ("plain", "deterministic", "fused"),
    "max-autotune": ("plain", "max-autotune"),
    "reduce-overhead": ("plain", "graph", "reduce-overhead"),
    "tiny": ("plain", "deterministic", "eager", "traced"),
}
"""Engines of Lockstep (`HOW`) and kinds of networks that are compared. Captured steps keep their
memory, so few are compared in their mode."""
ROUNDS = 5
TURN_MS = 1000.0
STEPS = 5
"""Steps of a trace."""


class Lockstep:
    """Lockstep's engine on a held batch of noise."""

    def __init__(self, recipe: Recipe, device: str, kind: str) -> None:
        how = {"backend": "torch", "device": device} | HOW[kind]
        execution = Execution.of(how | {"compile": "off" if device == "cpu" else "auto"})
        self.is_deterministic = execution.deterministic
        self.engine, _ = engine(recipe, execution)
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
        self.model: nn.Module = Model(recipe.spec, recipe).to(device).train()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        shape = (recipe.global_batch_images, 3, recipe.image_size, recipe.image_size)
        images = torch.randn(shape, device=device)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(0, recipe.logits, shape[:1], device=device)
        self._criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        self._loss = self._compute_loss
        if kind in COMPILERS:
            self._loss = torch.compile(self._compute_loss, **COMPILERS[kind])

    def _compute_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = DTYPES.get(self.recipe.precision)
        with torch.autocast(self.device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self._criterion(self.model(images), labels)

    def compute_loss(self) -> Tensor:
        """Return the loss of the batch."""
        return self._loss(self._images, self._labels)


class Loop:
    """A training loop with one of `OPTIMIZERS`, as a careful user of PyTorch writes it: with a
    GradScaler for fp16, and nothing read from the device (docs/results/gpu.md)."""

    is_deterministic = False

    def __init__(self, network: Network, optimizer: str) -> None:
        self._compute_loss = network.compute_loss
        recipe = network.recipe
        same = {"lr": 1e-3, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
        options = same | OPTIMIZERS[optimizer]
        self._optimizer = torch.optim.SGD(network.model.parameters(), **options)
        self._scaler = torch.amp.GradScaler(network.device, enabled=recipe.precision == "fp16")

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            self._optimizer.zero_grad(set_to_none=True)
            self._scaler.scale(self._compute_loss()).backward()
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


def measure_rates(device: str, model: str, precision: str, batch: int, mode: str) -> Rows:
    """Yield images per second of every contender: the mean, and that of every round. They are
    yielded after each round from the second on, so that minutes that end early leave figures. An
    error while contenders are built ends only those that share a network."""
    is_tiny = mode == "tiny"
    recipe = make_recipe(model, precision, batch, tiny=is_tiny)
    same = {"what": "train", "model": model, "precision": precision, "batch": batch, "mode": mode}
    contenders: dict[str, Contender] = {}
    for kind in MODES[mode]:
        began = time.perf_counter()
        try:
            contenders |= build_contenders(recipe, device, kind)
            print(f"{kind}: ready in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        except Exception as error:  # too little memory, or a compiler's own errors
            reason = f"{type(error).__name__}: {error!s:.600}"
            yield same | {"contender": kind, "status": "failed", "reason": reason}
    if not contenders:
        raise RuntimeError("no contender could be built; the rows say why")
    for times in alternate(contenders, device, *((2, 0.0) if is_tiny else (ROUNDS, TURN_MS))):
        for name, milliseconds in times.items():
            rates = [1000 * batch / ms for ms in milliseconds]
            row = {"contender": name, "status": "ok", "images_per_sec": sum(rates) / len(rates)}
            yield same | row | {"rounds": rates}


def alternate(
    contenders: Mapping[str, Contender], device: str, rounds: int, turn_ms: float
) -> Iterator[dict[str, list[float]]]:
    """Yield the milliseconds of a step of every contender in every round so far, after the second
    round and every later one. A turn takes about `turn_ms`, and at least two steps. Each round
    begins with another contender."""
    steps = {}
    for name, contender in contenders.items():
        steps[name] = max(round(turn_ms / _take_turn(contender, device, 2)), 2)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(rounds):
        for name in order:
            times[name].append(_take_turn(contenders[name], device, steps[name]))
        order.append(order.pop(0))
        if number:
            yield times


def _take_turn(contender: Contender, device: str, steps: int) -> float:
    """Return the milliseconds of a step. One before the turn is not counted."""
    select_kernels(contender, device)
    contender.run(1)
    return measure_ms(partial(contender.run, steps), device) / steps


def measure_profile(
    device: str, model: str, precision: str, batch: int, kind: str, trace: str, tiny: int = 0
) -> Rows:
    """Write a compressed trace of some steps; of an engine, yield the time of the host and the
    memory. Of the loops of a network, the last one is traced."""
    recipe = make_recipe(model, precision, batch, tiny=bool(tiny))
    name, contender = build_contenders(recipe, device, kind).popitem()
    contender.run(4)
    wait(device)
    if isinstance(contender, Lockstep):
        same = {"contender": name, "model": model, "precision": precision, "batch": batch}
        yield {"what": "host"} | same | _measure_host(contender, device)
    with tempfile.TemporaryDirectory() as folder:
        with profile(Path(folder)):
            contender.run(STEPS)
        Path(trace).write_bytes(gzip.compress((Path(folder) / "trace.json").read_bytes()))


def _measure_host(lockstep: Lockstep, device: str) -> dict[str, float]:
    """Return how long `train` keeps the host for a step, and for several; and the memory. The
    device is idle before, so the queue of the driver is empty and does not hold the host."""

    def time_steps(steps: int) -> tuple[float, float]:
        wait(device)
        began = time.perf_counter()
        handle = lockstep.begin(steps)
        returned = time.perf_counter() - began
        lockstep.engine.fetch(handle)
        return returned, time.perf_counter() - began

    median = statistics.median(time_steps(1)[0] for _ in range(10))
    returned, done = time_steps(STEPS)
    row = {"host_ms_a_step": 1000 * median, "returned_sec": returned, "done_sec": done}
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return row


def measure(what: str, **settings: Any) -> Rows:
    """Yield rows about "rates" or a "profile"."""
    return measure_rates(**settings) if what == "rates" else measure_profile(**settings)


if __name__ == "__main__":
    print_rows(measure)
