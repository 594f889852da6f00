"""A model repository for Triton Inference Server: `NAME/config.pbtxt`, `NAME/labels.txt` and
`NAME/1/model.onnx`.

NAME is the model's, such as resnet50. Triton collects images of several requests in a batch, up to
the largest batch.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from lockstep.inference.targets import Inputs, Program, ProgramSpec, onnx_file
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_lines

MOST_IMAGES = 32
"""The largest batch if none is given."""
DELAY_MICROSECONDS = 500
"""How long a request may wait for others: a small part of the time that one image takes on a CPU.
"""
_LABELS = "labels.txt"


def write(wanted: ProgramSpec, folder: Path) -> None:
    """Write a repository with one model. `batch` of `wanted` is the largest batch; smaller ones are
    allowed."""
    data = replace(wanted, batch=None).onnx_model(photos=True).SerializeToString()
    model = folder / _name(wanted)
    (model / "1").mkdir(parents=True)
    (model / "1" / onnx_file.FILE).write_bytes(data)
    write_lines(model / _LABELS, wanted.weights.classes)
    (model / "config.pbtxt").write_text(_config(wanted), encoding="utf-8")


def open_program(inputs: Inputs, folder: Path) -> AbstractContextManager[Program]:
    """Return the model in ONNX Runtime, which Triton runs it with. Raises `CheckpointError` unless
    there is one model."""
    models = [path.parent for path in folder.glob(f"*/1/{onnx_file.FILE}")]
    if len(models) != 1:
        raise CheckpointError(
            f"{folder} has {len(models)} models; expected one, as `export --to triton` writes it"
        )
    return onnx_file.open_program(inputs, models[0])


def _name(wanted: ProgramSpec) -> str:
    name = wanted.weights.recipe.model
    return name if isinstance(name, str) else "model"


def _config(wanted: ProgramSpec) -> str:
    """Return the configuration of the model, as text of the message ModelConfig. Shapes are without
    the batch."""
    side = wanted.weights.recipe.eval_crop
    logits = wanted.weights.recipe.logits
    labels = f', label_filename: "{_LABELS}"' if wanted.weights.classes else ""
    if wanted.bare:
        inputs = f'{{ name: "input", data_type: TYPE_FP32, dims: [ 3, {side}, {side} ] }}'
        outputs = [f'{{ name: "logits", data_type: TYPE_FP32, dims: [ {logits} ]{labels} }}']
    else:
        inputs = '{ name: "images", data_type: TYPE_UINT8, dims: [ -1, -1, 3 ] }'
        outputs = [
            # A number for each image: Triton's dims cannot be empty, so they are reshaped to none.
            '{ name: "classes", data_type: TYPE_INT64, dims: [ 1 ], reshape: { shape: [ ] } }',
            f'{{ name: "probabilities", data_type: TYPE_FP32, dims: [ {logits} ]{labels} }}',
        ]
    lines = [
        f'name: "{_name(wanted)}"',
        'platform: "onnxruntime_onnx"',
        f"max_batch_size: {wanted.batch or MOST_IMAGES}",
        f"input: [ {inputs} ]",
        f"output: [ {', '.join(outputs)} ]",
        f"dynamic_batching: {{ max_queue_delay_microseconds: {DELAY_MICROSECONDS} }}",
    ]
    return "".join(f"{line}\n" for line in lines)
