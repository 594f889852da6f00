"""Paddle Inference. The predictor itself is in the backend's folder, the only place that imports
its framework."""

import importlib
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep import backends
from lockstep.inference.engines import ENGINES, Order, cpu_name
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError

NAME = "paddle-inference"


class PaddleInference:
    """A program with the weights, in a predictor."""

    name = NAME

    def __init__(self, order: Order) -> None:
        recipe = order.weights.recipe
        self.precision = recipe.precision
        found = device(order.execution)
        self.on_gpu = found == "cuda"
        self.device = "GPU" if self.on_gpu else cpu_name()
        predictor = _module("predictor")
        options = predictor.Options(
            device=found, precision=self.precision, max_batch_images=order.most_images
        )
        with tempfile.TemporaryDirectory(prefix="lockstep-program-") as name:
            folder = Path(name) / "program"
            plain = recipe.replace(precision="fp32")  # the predictor chooses the precision
            _module("export").export(plain, order.weights.tensors, (), folder, logits=True)
            self._predictor = predictor.open_predictor(folder, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._predictor = None

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        [logits] = self._predictor.outputs(images)
        return np.asarray(logits, np.float32)


def opened(order: Order) -> PaddleInference:
    """Return a predictor that holds the weights."""
    if order.exported is not None:
        raise BackendError(f"{NAME} does not run ONNX models; use --engine onnxruntime or openvino")
    return PaddleInference(order)


def device(execution: Execution) -> str:
    """Return "cuda" if the execution asks for it, else "cpu": its code for GPUs has not been run."""
    return "cuda" if execution.device == "cuda" else "cpu"


def _module(name: str) -> Any:
    backend = ENGINES[NAME].framework
    backends.load(backend)
    return importlib.import_module(f"lockstep.backends.{backend}.{name}")
