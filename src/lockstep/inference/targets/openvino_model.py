"""`model.xml` and `model.bin` for OpenVINO, converted from the ONNX model by OpenVINO itself."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.inference.targets import CLASSES, Answers, Wanted, package
from lockstep.system.files import write_lines

FILE = "model.xml"


def write(wanted: Wanted, folder: Path) -> None:
    """Write `model.xml`, `model.bin` and `classes.txt`. Images have the evaluation's size, as in the ONNX model.

    In fp16, weights are stored as float16. OpenVINO chooses what it computes in.
    """
    library, weights = package("openvino", "openvino"), wanted.weights
    in_half, side = weights.recipe.precision == "fp16", weights.recipe.eval_crop
    model = replace(wanted, weights=weights.in_precision("fp32")).onnx_model()
    with tempfile.TemporaryDirectory(prefix="lockstep-openvino-") as name:
        source = Path(name) / "model.onnx"
        source.write_bytes(model.SerializeToString())
        converted = library.convert_model(str(source))
        count = -1 if wanted.batch is None else wanted.batch
        converted.reshape([count, 3, side, side] if wanted.bare else [count, side, side, 3])
        folder.mkdir()
        library.save_model(converted, str(folder / FILE), compress_to_fp16=in_half)
    write_lines(folder / CLASSES, weights.classes)


def answers(wanted: Wanted, folder: Path, images: np.ndarray) -> Answers:
    """Return what OpenVINO answers for uint8 images [N, S, S, 3] on a CPU, in fp32 or int8."""
    core = package("openvino", "openvino").Core()
    compiled = core.compile_model(str(folder / FILE), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: np.ndarray) -> Answers:
        found = compiled([inputs])
        if wanted.bare:
            logits = np.array(found["logits"])
            return logits.argmax(axis=1), logits
        return np.array(found["classes"]), np.array(found["probabilities"])

    return wanted.in_batches(images, run)
