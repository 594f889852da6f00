"""`model.plan`: what TensorRT builds for this machine's GPU. This has not been run,
because no GPU was available.

A plan runs only on the kind of GPU and with the version of TensorRT that built it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lockstep.inference.runtimes import tensorrt
from lockstep.inference.targets import CLASSES, Answers, Inputs, Program, ProgramSpec, package
from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular

FILE = "model.plan"
MOST_IMAGES = 32
"""The largest batch if batches are of any size."""


def write(wanted: ProgramSpec, folder: Path) -> None:
    """Write `model.plan` and `classes.txt`. Batches are of `batch` images, or of 1 to
    `MOST_IMAGES`."""
    package("tensorrt", "tensorrt")
    side = wanted.weights.recipe.eval_crop
    shape = (3, side, side) if wanted.bare else (side, side, 3)
    batches = (1, MOST_IMAGES) if wanted.batch is None else (wanted.batch, wanted.batch)
    plan = tensorrt.build_plan(
        wanted.onnx_model(photos=False).SerializeToString(), shape, batches, tf32=False
    )
    folder.mkdir()
    (folder / FILE).write_bytes(plan)
    write_lines(folder / CLASSES, wanted.weights.classes)


@contextmanager
def open_program(inputs: Inputs, folder: Path) -> Iterator[Program]:
    """Yield the plan in TensorRT. It takes squares."""
    plan = tensorrt.Plan(read_regular(folder / FILE, WEIGHTS))

    def run(batch: np.ndarray) -> Answers:
        answers = plan.run(batch)
        values = answers["logits" if inputs.bare else "probabilities"]
        return answers.get("classes", values.argmax(axis=1)), values

    try:
        yield lambda images: inputs.run_batches(images, run, most=MOST_IMAGES)
    finally:
        plan.close()
