"""Paddle Inference. The predictor itself is in the backend's folder, the only place that imports
its framework."""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.inference.runtimes import RUNTIMES, Runtime, RuntimeSetup, describe_cpu
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError

NAME = "paddle-inference"


class PaddleInference(Runtime):
    """A program with the weights, in a predictor."""

    name = NAME

    def __init__(self, setup: RuntimeSetup) -> None:
        if setup.exported is not None:
            raise BackendError(
                f"{NAME} does not run ONNX models; use --runtime onnxruntime or openvino"
            )
        recipe = setup.weights.recipe
        self.precision = recipe.precision
        device = choose_device(setup.execution)
        self.on_gpu = device == "cuda"
        self.device = "GPU" if self.on_gpu else describe_cpu()
        predictor = _load_module("predictor")
        options = predictor.Options(
            device=device, precision=self.precision, max_batch_images=setup.most_images
        )
        with tempfile.TemporaryDirectory(prefix="lockstep-program-") as name:
            folder = Path(name) / "program"
            plain = recipe.replace(precision="fp32")  # the predictor chooses the precision
            _load_module("export").export(plain, setup.weights.tensors, (), folder, logits=True)
            self._predictor = predictor.open_predictor(folder, options)

    def __exit__(self, *error: object) -> None:
        self._predictor = None

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        [logits] = self._predictor.outputs(images)
        return np.asarray(logits, np.float32)


RUNTIME = PaddleInference


def choose_device(execution: Execution) -> str:
    """Return "cuda" if the execution asks for it, else "cpu": GPUs were never tried."""
    return "cuda" if execution.device == "cuda" else "cpu"


def _load_module(name: str) -> Any:
    backend = RUNTIMES[NAME].framework
    backends.load(backend)
    return importlib.import_module(f"lockstep.backends.{backend}.{name}")
