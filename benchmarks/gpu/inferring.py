"""Part: inference, from uint8 images in main memory to logits in main memory, by every engine that
is installed."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engines import held_batch, recipe_of
from benchmarks.gpu.switches import Switches
from benchmarks.gpu.timing import Ground, Say, median_ms
from lockstep.backends.torch.model import Model
from lockstep.inference.runtimes import (
    NATIVE,
    RUNTIMES,
    choose_device,
    explain_refusal,
    open_runtime,
)
from lockstep.models.architectures import model_spec
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.errors import BackendError
from lockstep.weights import LOCKSTEP, Weights

BATCHES = (1, 8, 32, 128, 256)
TINY = (NATIVE, "onnxruntime")
"""Engines that are tried on a tiny ground: those that load nothing that another framework minds."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
A_SCALE = 0.05
"""Scale of every input of the int8 network: speed does not depend on it."""
Predict = Callable[[np.ndarray], object]


def measure(ground: Ground, say: Say) -> None:
    """Write a row for every engine, precision and batch."""
    for precision in ("fp32",) if ground.tiny else ("fp16", "bf16"):
        for kind in ("eager",) if ground.tiny else ("eager", "compile"):
            about = {"engine": f"plain PyTorch, {kind}", "precision": precision}
            _timed(ground, say, about, _plain(ground, precision, kind))
    precisions = ("fp32",) if ground.tiny else ("fp16", "bf16", "tf32")
    for precision in (*precisions, "int8"):
        for name in TINY if ground.tiny else (NATIVE, *RUNTIMES):
            if name == NATIVE and precision == "int8":
                # it rounds to int8 and multiplies in float, to train; it is not meant to be fast
                continue
            _engine(ground, say, name, precision)


def _engine(ground: Ground, say: Say, name: str, precision: str) -> None:
    about = {"engine": name, "precision": precision}
    recipe = _recipe(ground, precision)
    why = (
        ""
        if name == NATIVE
        else _why_not(name, recipe.precision, ground.device, quantised=precision == "int8")
    )
    if why:
        say({"what": "inference", "status": "missing", "reason": why} | about)
        return
    scales = dict.fromkeys(layers(model_spec(recipe.model)), A_SCALE) if precision == "int8" else {}
    weights = Weights(
        recipe, initial_state(recipe), (), Path("initial weights"), LOCKSTEP, scales=scales
    )
    execution = Execution.of({"backend": "torch", "device": ground.device})
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(
                open_runtime(name, weights, execution, most_images=BATCHES[-1])
            )
        except BackendError as error:
            say({"what": "inference", "status": "failed", "reason": str(error)[:600]} | about)
            return
        _timed(ground, say, about, engine.predict)


def _recipe(ground: Ground, precision: str) -> Recipe:
    if precision != "int8":
        return recipe_of(ground, "resnet50", precision, 256)
    in_float = "fp16" if ground.device == "cuda" else "fp32"
    return recipe_of(ground, "resnet50", in_float, 256, quantisation="int8")


def _why_not(name: str, precision: str, device: str, *, quantised: bool) -> str:
    """Return why an engine cannot be measured; "" if it can."""
    row = RUNTIMES[name]
    if row.is_missing():
        return f"{name} is not installed: {row.install}"
    try:
        choose_device(name, Execution.of({"device": device}))
    except BackendError as error:  # such as a package without CUDA
        return str(error)
    if quantised and not row.quantises:
        return f"{name} does not compute in int8"
    return explain_refusal(name, precision, device)


def _plain(ground: Ground, precision: str, kind: str) -> Predict:
    """Return inference as a careful user of PyTorch writes it: weights in the precision, channels
    last, pinned memory."""
    Switches.of_a_careful_user(precision).set()
    recipe = recipe_of(ground, "resnet50", precision, 256)
    dtype = DTYPES[precision]
    model = Model(model_spec(recipe.model), recipe).to(ground.device, dtype).eval()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mean, std = (
        torch.tensor(v, device=ground.device).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std)
    )

    def logits(images: torch.Tensor) -> torch.Tensor:
        x = ((images.permute(0, 3, 1, 2).float() - mean) / std).to(dtype)
        return model(x.contiguous(memory_format=torch.channels_last)).float()

    run = (
        logits if kind == "eager" else torch.compile(logits, mode="reduce-overhead", dynamic=False)
    )

    @torch.inference_mode()
    def predict(images: np.ndarray) -> object:
        on_host = torch.from_numpy(images)
        if ground.device == "cuda":
            on_host = on_host.pin_memory()
        return run(on_host.to(ground.device, non_blocking=True)).cpu().numpy()

    return predict


def _timed(ground: Ground, say: Say, about: dict[str, Any], predict: Predict) -> None:
    for images in (1, 4) if ground.tiny else BATCHES:
        batch = held_batch(_recipe(ground, "fp32"), images=images).images
        row: dict[str, Any] = {"what": "inference", "batch": images} | about
        try:
            ms = median_ms(lambda batch=batch: predict(batch), ground, 3 if ground.tiny else 30)  # type: ignore[misc]
        except Exception as error:  # each library has its own errors
            say(row | {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]})
            return
        say(row | {"status": "ok", "ms": ms, "images_per_sec": 1000 * images / ms})
