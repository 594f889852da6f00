"""What the modules of this folder share."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.models.architectures import MODELS, narrow_model
from lockstep.recipes import Recipe, load_recipe
from lockstep.system.strict_json import to_json

Rows = Iterator[Mapping[str, Any]]


def print_rows(measure: Callable[..., Rows]) -> None:
    """Measure with the settings of the command line, such as batch=4. Print a row at once, so that
    it outlives the process."""
    settings: dict[str, Any] = {}
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        settings[name] = int(value) if value.isdigit() else value
    for row in measure(**settings):
        print(to_json(dict(row)), flush=True)


def make_recipe(model: str, precision: str, batch: int, *, tiny: bool) -> Recipe:
    """Return NVIDIA's recipe with another model and precision; if tiny, narrow and with small
    images."""
    scaling = {"fp16": "static", "fp16-dynamic": "dynamic"}.get(precision, "none")
    fields: dict[str, Any] = {"model": model, "global_batch_images": batch}
    fields |= {"precision": precision.split("-")[0], "loss_scaling": scaling}
    if tiny:
        fields |= {"model": narrow_model(MODELS[model]), "logits": 10}
        fields |= {"image_size": 32, "eval_crop": 32, "eval_resize": 36}
    return load_recipe("resnet50-paddle-90ep").replace(**fields)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_ms(call: Callable[[], object], device: str) -> float:
    """Return the milliseconds of a call, until the device is done."""
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return 1000 * (time.perf_counter() - began)
