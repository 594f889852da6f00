"""`model.onnx`: the ONNX model itself, run by ONNX Runtime on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from lockstep.inference.runtimes import onnxruntime
from lockstep.inference.targets import CLASSES, Answers, Inputs, Program, ProgramSpec
from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular

FILE = "model.onnx"


def write(wanted: ProgramSpec, folder: Path) -> None:
    """Write `model.onnx`, and the names of the classes to `classes.txt`, one on each line."""
    data = wanted.onnx_model(photos=True).SerializeToString()
    folder.mkdir()
    (folder / FILE).write_bytes(data)
    write_lines(folder / CLASSES, wanted.weights.classes)


def open_program(inputs: Inputs, folder: Path) -> AbstractContextManager[Program]:
    """Return the model in ONNX Runtime."""
    session = Session(read_regular(folder / FILE, WEIGHTS))
    return nullcontext(lambda images: inputs.run_batches(images, session.run))


class Session:
    """A model in ONNX Runtime, on a CPU."""

    def __init__(self, model: bytes) -> None:
        self._session = onnxruntime.open_session(model)
        [self._input] = [node.name for node in self._session.get_inputs()]

    def run(self, inputs: np.ndarray) -> Answers:
        """Return the answers for a batch."""
        *classes, values = self._session.run(None, {self._input: inputs})
        return (classes[0] if classes else values.argmax(axis=1)), values
