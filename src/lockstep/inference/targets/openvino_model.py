"""`model.xml` and `model.bin` for OpenVINO, converted from the ONNX model by OpenVINO itself."""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.inference.targets import CLASSES, Answers, Inputs, Program, ProgramSpec, package
from lockstep.system.files import write_lines

FILE = "model.xml"


def write(wanted: ProgramSpec, folder: Path) -> None:
    """Write `model.xml`, `model.bin` and `classes.txt`.

    In fp16, weights are stored as float16. OpenVINO chooses what it computes in.
    """
    library = package("openvino", "openvino")
    weights = wanted.weights
    in_half = weights.recipe.precision == "fp16"
    model = replace(wanted, weights=weights.replace_precision("fp32")).onnx_model(photos=False)
    with tempfile.TemporaryDirectory(prefix="lockstep-openvino-") as name:
        source = Path(name) / "model.onnx"
        source.write_bytes(model.SerializeToString())
        converted = library.convert_model(str(source))
        shape = converted.input(0).partial_shape
        shape[0] = -1 if wanted.batch is None else wanted.batch
        converted.reshape(shape)
        folder.mkdir()
        library.save_model(converted, str(folder / FILE), compress_to_fp16=in_half)
    write_lines(folder / CLASSES, weights.classes)


def open_program(inputs: Inputs, folder: Path) -> AbstractContextManager[Program]:
    """Return the model in OpenVINO on a CPU, in fp32 or int8."""
    core = package("openvino", "openvino").Core()
    compiled = core.compile_model(str(folder / FILE), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(batch: np.ndarray) -> Answers:
        answers = compiled([batch])
        if inputs.bare:
            logits = np.array(answers["logits"])
            return logits.argmax(axis=1), logits
        return np.array(answers["classes"]), np.array(answers["probabilities"])

    return nullcontext(lambda images: inputs.run_batches(images, run))
