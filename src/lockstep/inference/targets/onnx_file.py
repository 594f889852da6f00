"""`model.onnx`: the ONNX model itself, run by ONNX Runtime on a CPU."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference.targets import Answers, Wanted

FILE = "model.onnx"
_ERRORS = 3
"""The severity from which ONNX Runtime prints messages."""


def write(wanted: Wanted, folder: Path) -> None:
    """Write `model.onnx`, and the names of the classes to `classes.txt`, one on each line."""
    data = wanted.onnx_model().SerializeToString()
    folder.mkdir()
    (folder / FILE).write_bytes(data)
    write_classes(wanted.weights.classes, folder / "classes.txt")


def write_classes(classes: tuple[str, ...], path: Path) -> None:
    """Write names of classes, one on each line; nothing if there are none."""
    if classes:
        path.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")


def answers(wanted: Wanted, folder: Path, images: np.ndarray) -> Answers:
    """Return what ONNX Runtime answers for uint8 images [N, S, S, 3]."""
    return wanted.in_batches(images, Session((folder / FILE).read_bytes()).run)


class Session:
    """A model in ONNX Runtime, on a CPU."""

    def __init__(self, model: bytes) -> None:
        onnxruntime: Any = importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        [self._input] = [each.name for each in self._session.get_inputs()]

    def run(self, inputs: np.ndarray) -> Answers:
        """Return the answers for a batch."""
        *classes, values = self._session.run(None, {self._input: inputs})
        return (classes[0] if classes else values.argmax(axis=1)), values
