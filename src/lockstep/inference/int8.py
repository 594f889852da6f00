"""Int8 after training: an ONNX model or a program for phones that is calibrated on training images,
and what it loses on validation images.

Programs for phones are quantised by their frameworks' own quantisers (`lockstep.backends`), ONNX
models by ONNX Runtime's static quantiser. It measures the range of every value on the calibration
images, and puts pairs of QuantizeLinear and DequantizeLinear at the inputs and outputs of
convolutions, sums, pools and the classifier. Weights have a scale for each output channel.
Batch norms are folded first, so that ONNX Runtime computes convolutions in integers.

The logits themselves stay float32: 8 bits would make many of them equal.
"""

import contextlib
import importlib
import io
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index, subset
from lockstep.data.loading.loaders import open_evaluation
from lockstep.data.sources import find_split, holds_split
from lockstep.data.split import divide_index, whole_source
from lockstep.inference import onnx_model
from lockstep.inference.comparison import open_engine
from lockstep.inference.evaluation_images import check_classes
from lockstep.inference.label_matching import match_labels
from lockstep.inference.targets import Program, ProgramSpec, Target
from lockstep.inference.targets.onnx_file import Session
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.recipes import Execution
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import BackendError, CheckpointError, DataError, as_path, nearest
from lockstep.system.strict_json import to_json
from lockstep.weights import Weights

METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
"""How the range of a value is found, with ONNX Runtime's names. Entropy and percentile leave out
the rarest values."""
KEY = "lockstep_int8"
"""The property of an ONNX model that holds what `Loss` describes, as JSON."""
BATCH_IMAGES = 8
"""Images that are calibrated on together: entropy and percentile keep all values of a batch in
memory."""
_QUANTISED = ["Conv", "Relu", "Add", "MaxPool", "GlobalAveragePool", "Flatten", "Gemm"]
"""The operators between the normalised images and the logits."""


@dataclass(frozen=True)
class Int8:
    """How to quantise after training: a `precision` of `Model.export`.

    Raises:
        CheckpointError: `images` is less than 1, or `tolerance` is negative.

    >>> import lockstep
    >>> lockstep.Int8("data", images=512, tolerance=0.5).method
    'minmax'
    """

    data: str | Path
    """The data set. Its training images calibrate, its validation images measure the loss of top-1.
    """
    images: int = 256
    """At most this many images calibrate, spread evenly over the training images."""
    method: str = "minmax"
    """"minmax", "entropy" or "percentile", of which the last two leave out the rarest values."""
    tolerance: float = 1.0
    """The largest loss of top-1 that is accepted, in percentage points."""

    def __post_init__(self) -> None:
        if self.images < 1 or not self.tolerance >= 0:
            raise CheckpointError(
                f"images is {self.images} and tolerance {self.tolerance}; expected at least 1 image"
                " and a tolerance of at least 0"
            )


class Loss(TypedDict):
    """What int8 costs."""

    method: str
    calibration_images: int
    validation_images: int
    top1_before: float
    """Top-1 of the model in fp32, in percent: of the ONNX model, or of the backend's engine."""
    top1_after: float


def quantise(
    target: Target, wanted: ProgramSpec, how: Int8, recorder: Recorder
) -> tuple[ProgramSpec, Loss]:
    """Return what to write with a program in int8, and what it loses. An ONNX model has this in its
    metadata, too.

    Raises `BackendError` without the quantiser, `DataError` if images are missing, and
    `CheckpointError` if more than the tolerance is lost.
    """
    methods = [*METHODS] if target.phone_file is None else ["minmax"]
    if how.method not in methods:
        raise CheckpointError(
            f"there is no method {how.method!r} to calibrate {target.name} with."
            f" {nearest(how.method, methods)}"
        )
    weights = wanted.weights
    training, validation = _open_sets(as_path(how.data, "data"), weights, recorder)
    chosen = np.unique(
        np.linspace(0, len(training) - 1, min(how.images, len(training))).astype(np.int64)
    )
    calibrating = recorder.watch(
        "calibrating", _load_batches(subset(training, chosen), weights), _count_batches(len(chosen))
    )
    squares = (batch.pixels for batch in calibrating)
    with contextlib.ExitStack() as stack:
        if target.phone_file is None:
            quantised, programs = _quantise_onnx(target, wanted, squares, len(chosen), how.method)
        else:
            quantised = target.build_phone_program(weights, squares)
            engine = stack.enter_context(open_engine(weights, str(target.backend)))
            programs = [engine, target.load_phone_program(wanted.inputs(), quantised)]
        hits = _count_hits(weights, programs, validation, recorder)
    before, after = (100.0 * count / len(validation) for count in hits)
    if not before - after <= how.tolerance:
        advice = f"another --method ({', '.join(methods)}), " if len(methods) > 1 else ""
        raise CheckpointError(
            f"int8 loses {before - after:.2f} points of top-1:"
            f" {format_accuracy(before, len(validation))} before and"
            f" {format_accuracy(after, len(validation))} after, of {len(validation)} images;"
            f" expected to lose at most {how.tolerance:g} (--tolerance). Nothing is written. Try"
            f" {advice}more --calibration-images, or train with quantisation"
        )
    loss: Loss = {
        "method": how.method,
        "calibration_images": len(chosen),
        "validation_images": len(validation),
        "top1_before": before,
        "top1_after": after,
    }
    if target.phone_file is None:
        _describe(quantised, wanted.batch if target.fixes_batch else None, loss)
    return replace(wanted, quantised=quantised), loss


def _open_sets(data: Path, weights: Weights, recorder: Recorder) -> tuple[Index, Index]:
    """Return the training and the validation images; labels are outputs of the weights."""
    division = weights.recipe.division
    if not division or (not weights.recipe.folds and holds_split(data, "val")):
        sources = [find_split(data, split) for split in ("train", "val")]
    else:
        sources = [whole_source(data, division)]
    progress = recorder.progress("indexing")
    matched = [match_labels(source, weights, progress) for source in sources]
    for remark in filter(None, (matched[0].remark, matched[0].left_out)):
        recorder.note(remark)
    indexes = [images.index for images in matched]
    check_classes(indexes[0], indexes[0].source, weights.recipe.logits)
    if len(indexes) == 1:
        indexes = list(divide_index(indexes[0], division))
    training, validation = indexes
    if not len(training) or not len(validation):
        raise DataError(f"{data} has no training or no validation images; int8 needs both")
    return training, validation


def _load_batches(index: Index, weights: Weights) -> Iterator[Batch]:
    """Yield all images as in evaluation, without padding."""
    recipe = weights.recipe
    with open_evaluation(index, recipe, Execution(), BATCH_IMAGES) as batches:
        for batch in batches:
            real = batch.labels >= 0
            yield Batch(batch.pixels[real], batch.labels[real])


def _count_batches(images: int) -> int:
    return -(-images // BATCH_IMAGES)


class _Reader:
    """Gives ONNX Runtime's quantiser one batch after another."""

    def __init__(self, name: str, batches: Iterator[np.ndarray], count: int) -> None:
        self._name = name
        self._batches = batches
        self._count = count
        self._left = count

    def __len__(self) -> int:
        return self._count

    def set_range(self, start_index: int, end_index: int) -> None:
        """Give these batches only, until the next call. The quantiser asks for all of them in
        order."""
        self._left = end_index - start_index

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the inputs of the next batch; None if there are no more."""
        if self._left == 0:
            return None
        self._left -= 1
        return {self._name: next(self._batches)}


def quantise_for_speed(weights: Weights, images: np.ndarray, *, symmetric: bool) -> bytes:
    """Return an ONNX model in int8 from `images` to `logits`, to measure how fast int8 is: that
    does not depend on values.

    It is quantised as exports are, on a few uint8 images [N, S, S, 3] of any kind. `symmetric` is
    that of `Target.takes_symmetric_int8`. Raises `BackendError` without ONNX Runtime.
    """
    plain = onnx_model.logits_model(weights.recipe, weights.tensors, folded=True)
    model = _quantise_static(
        _import_library("onnx").load_from_string(plain),
        iter([images]),
        len(images),
        "minmax",
        symmetric=symmetric,
    )
    data: bytes = model.SerializeToString()
    return data


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendError(
            f"int8 after training needs onnxruntime: pip install onnxruntime==1.31.1 ({error})"
        ) from None


def _quantise_static(
    plain: Any, batches: Iterator[np.ndarray], images: int, method: str, *, symmetric: bool
) -> Any:
    """Return a model in int8, calibrated on some images."""
    onnx = _import_library("onnx")
    library = _import_library("onnxruntime.quantization")
    kinds = library.QuantType
    reader = _Reader(plain.graph.input[0].name, batches, _count_batches(images))
    with tempfile.TemporaryDirectory(prefix="lockstep-int8-") as name, _silence():
        source, path = (Path(name) / file for file in ("float.onnx", "int8.onnx"))
        source.write_bytes(plain.SerializeToString())
        library.quantize_static(
            str(source),
            str(path),
            reader,
            quant_format=library.QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            nodes_to_exclude=_list_float_nodes(plain),
            per_channel=True,
            # Processors with AVX2 and without VNNI add up pairs of products in 16 bits. With
            # weights of 8 bits these overflow, and ONNX Runtime's results are wrong.
            reduce_range=not symmetric,
            activation_type=kinds.QInt8 if symmetric else kinds.QUInt8,
            weight_type=kinds.QInt8,
            calibrate_method=getattr(library.CalibrationMethod, METHODS[method]),
            extra_options={
                "ActivationSymmetric": symmetric,
                # of all methods: batch after batch, so that memory does not grow with images
                "CalibStridedMinMax": 1,
                "OpTypesToExcludeOutputQuantization": ["Gemm"],
            },
        )
        return onnx.load(str(path))


def _list_float_nodes(plain: Any) -> list[str]:
    """Return the names of nodes that stay as they are: those of blurs, whose kernels are exact in
    float, and of squeeze-and-excitation, which has a thousandth of the operations."""
    names = [node.name for node in plain.graph.node]
    return [name for name in names if name.endswith(".blur") or ".se." in name]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress what the quantiser prints, and advice to prepare models that were not folded."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)


def _quantise_onnx(
    target: Target, wanted: ProgramSpec, squares: Iterator[np.ndarray], images: int, method: str
) -> tuple[Any, list[Program]]:
    """Return an ONNX model in int8, and the programs before and after."""
    weights = wanted.weights
    form = onnx_model.Form(None, wanted.bare, folded=True)
    plain = onnx_model.build_model(weights.recipe, weights.tensors, weights.classes, None, form)
    inputs = map(wanted.inputs().prepare, squares)
    symmetric = target.takes_symmetric_int8
    model = _quantise_static(plain, inputs, images, method, symmetric=symmetric)
    model.producer_name = plain.producer_name
    del model.metadata_props[:]
    model.metadata_props.extend(plain.metadata_props)
    return model, [_open_model(wanted, onnx) for onnx in (plain, model)]


def _open_model(wanted: ProgramSpec, model: Any) -> Program:
    """Return an ONNX model that takes batches of any size."""
    session = Session(model.SerializeToString())
    inputs = replace(wanted.inputs(), batch=None)
    return lambda squares: inputs.run_batches(squares, session.run)


def _count_hits(
    weights: Weights, programs: list[Program], validation: Index, recorder: Recorder
) -> list[int]:
    """Return the number of images that each program classifies right."""
    hits = [0] * len(programs)
    batches = _load_batches(validation, weights)
    for batch in recorder.watch(
        "evaluating before and after", batches, _count_batches(len(validation))
    ):
        for place, program in enumerate(programs):
            classes, _ = program(batch.pixels)
            hits[place] += int((classes == batch.labels).sum())
    return hits


def _describe(model: Any, batch: int | None, loss: Loss) -> None:
    """Add to a model what int8 costs, and its batch."""
    model.metadata_props.add(key=KEY, value=to_json(loss))
    if batch is not None:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = batch
