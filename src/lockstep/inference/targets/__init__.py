"""The formats that `lockstep export` writes: one row each, and a file for each one that no backend
writes.

Backends write the formats of their frameworks (`lockstep.backends.frameworks`). The others are made
of an ONNX model.
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Framework
from lockstep.backends.frameworks import Export
from lockstep.inference import onnx_model
from lockstep.system.errors import BackendError, CheckpointError, nearest
from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular
from lockstep.system.strict_json import to_json
from lockstep.weights import Weights
from lockstep.weights.formats import onnx_metadata
from lockstep.weights.formats.onnx_photos import take_photos

Answers = tuple[np.ndarray, np.ndarray]
"""What a program answers: classes, int64 [N], and probabilities, or the logits of a bare one,
float32 [N, logits]."""
Program = Callable[[np.ndarray], Answers]
"""A program that was loaded. It takes images, uint8 [N, H, W, 3], all of one size."""
CLASSES = "classes.txt"
"""The file next to a program that names the classes, one on each line."""
ONNX_PRECISIONS = ("fp32", "fp16", "int8")
"""The precisions of ONNX models, and of what is made from them."""
PHONE_PRECISIONS = ("fp32", "int8")
"""The precisions of programs for phones."""


@dataclass(frozen=True)
class Inputs:
    """What a program takes, and how images are turned into it."""

    batch: int | None
    """The number of images of every batch; None: any."""
    bare: bool
    """Whether it takes normalised images and returns logits."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, images: np.ndarray) -> np.ndarray:
        """Return what the program takes for uint8 images [N, H, W, 3]: these, or float32 [N, 3, S,
        S] for a bare one."""
        if not self.bare:
            return images
        normalised = (images - np.array(self.mean)) / np.array(self.std)
        return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2), np.float32)

    def run_batches(
        self, images: np.ndarray, run: Callable[[np.ndarray], Answers], *, most: int | None = None
    ) -> Answers:
        """Return a program's answers for uint8 images [N, H, W, 3], in batches that it takes; the
        last one is repeated.

        `most` is the largest batch of a program that takes batches of any size; None: any.
        """
        size = self.batch or min(len(images), most or len(images))
        inputs = self.prepare(images)
        classes = []
        values = []
        for start in range(0, len(images), size):
            places = np.minimum(np.arange(start, start + size), len(images) - 1)
            answers = run(inputs[places])
            classes.append(answers[0])
            values.append(answers[1])
        return np.concatenate(classes)[: len(images)], np.concatenate(values)[: len(images)]


@dataclass(frozen=True)
class ProgramSpec:
    """What to write."""

    weights: Weights
    """The precision of their recipe is the one to compute in. If they have scales, these are used.
    """
    batch: int | None = None
    """The number of images of every batch; None: any."""
    bare: bool = False
    """Whether the program takes normalised images and returns logits."""
    quantised: Any = None
    """What was quantised after training: an ONNX model, or the content of a program for phones.
    None: the program is made from the weights."""
    temperature: float = 1.0
    """The classifier of the weights is already divided by it, so that softmax gives calibrated
    probabilities in every format."""

    def onnx_model(self, *, photos: bool) -> Any:
        """Return the ONNX model: with `photos`, one that takes photos of any size, unless it is to
        be bare."""
        weights = self.weights
        model = self.quantised
        if model is None:
            form = onnx_model.Form(self.batch, self.bare)
            model = onnx_model.build_model(
                weights.recipe, weights.tensors, weights.classes, weights.scales, form
            )
        for entry in model.metadata_props:
            if entry.key == onnx_metadata.KEY:
                entry.value = to_json(weights.describe_preprocessing())
        calibration = weights.calibration
        if self.bare and calibration.temperature != 1:
            value = to_json(asdict(calibration))
            model.metadata_props.add(key=onnx_metadata.CALIBRATION, value=value)
        elif calibration.unknown_below:
            value = str(calibration.unknown_below)
            model.metadata_props.add(key=onnx_metadata.UNKNOWN_BELOW, value=value)
        return take_photos(model, weights.recipe) if photos and not self.bare else model

    def drop_scales(self) -> Self:
        """Return what to write without the scales of weights that were trained with
        quantisation."""
        recipe = self.weights.recipe.replace(quantisation="none")
        return replace(self, weights=replace(self.weights, recipe=recipe, scales={}))

    def inputs(self) -> Inputs:
        """Return what the program takes."""
        recipe = self.weights.recipe
        return Inputs(self.batch, self.bare, recipe.mean, recipe.std)


@dataclass(frozen=True, kw_only=True)
class Target(Export):
    """A format, as far as it can be described without the packages that it needs.

    Functions of its module write a program, and load it with the program's own runtime
    (`open_program`; `load_program` of one for phones). One of its distributions must be installed
    to compare.
    """

    name: str
    backend: str | None = None
    """The backend whose module writes it; None: it is made from an ONNX model."""
    fixes_batch: bool = True
    """Whether `batch` is the number of images of every batch; otherwise it is the largest batch."""
    takes_photos: bool = True
    """Whether a program resizes and crops photos of any size, as evaluation does. Otherwise it
    takes squares only."""
    takes_symmetric_int8: bool = False
    """Whether integers of values must be symmetric, with the zero point 0 and all of 8 bits, as
    TensorRT wants them."""
    can_run_code: bool = False
    """Whether a program can do more than compute: unpickle, run code, or read and write files. ONNX
    models and OpenVINO's cannot."""

    def runtime(self) -> str | None:
        """Return name and version of the runtime; None if it is missing."""
        version = Framework(self.distributions, self.install).version()
        return None if version is None else f"{self.distributions[0]} {version}"

    def write(self, wanted: ProgramSpec, folder: Path) -> None:
        """Write a program into a new folder. Raises `BackendError` if a package is missing, and
        `CheckpointError`."""
        weights = wanted.weights
        if self.phone_file is not None:
            program = wanted.quantised or self.build_phone_program(weights)
            folder.mkdir()
            (folder / self.phone_file).write_bytes(program)
            write_lines(folder / CLASSES, weights.classes)
        elif self.backend is not None:
            arguments: list[Any] = [weights.recipe, weights.tensors, weights.classes, folder]
            if self.stores_preprocessing:
                arguments.append(to_json(weights.describe_preprocessing()))
            self._call(self.function, *arguments)
        else:
            self._call(self.function, wanted, folder)

    def build_phone_program(
        self, weights: Weights, squares: Iterable[np.ndarray] | None = None
    ) -> bytes:
        """Return the content of a program for phones. It is quantised if there are squares, uint8
        [N, S, S, 3], to calibrate on.

        Raises `BackendError` if a package is missing, and `CheckpointError`.
        """
        program: bytes = self._call(self.function, weights.recipe, weights.tensors, squares)
        return program

    def load_phone_program(self, inputs: Inputs, program: bytes) -> Program:
        """Return a program for phones in its own runtime, for squares, uint8 [N, S, S, 3]."""
        run = self._call("load_program", program)
        return lambda squares: inputs.run_batches(squares, run)

    def open_program(self, inputs: Inputs, folder: Path) -> AbstractContextManager[Program]:
        """Return a written program in its own runtime. It answers uint8 images [N, H, W, 3]."""
        if self.phone_file is not None:
            content = read_regular(folder / self.phone_file, WEIGHTS)
            return nullcontext(self.load_phone_program(inputs, content))
        if self.backend is not None:
            return nullcontext(self._call("open_program", folder))
        program: AbstractContextManager[Program] = self._call("open_program", inputs, folder)
        return program

    def resizes(self, wanted: ProgramSpec) -> bool:
        """Return whether a program takes photos of any size. Otherwise it takes squares of one
        size."""
        return self.takes_photos and not wanted.bare

    def has_equal_pixels(self, wanted: ProgramSpec) -> bool:
        """Return whether a program sees the pixels of `predict`, bit for bit. Otherwise some differ
        by one level of 255."""
        recipe = wanted.weights.recipe
        if not self.resizes(wanted):
            return True
        is_half_pixel = recipe.eval_sampling == "half_pixel"
        is_opencv_cubic = is_half_pixel and recipe.interpolation == "bicubic"
        is_fused = self.fuses_products and not is_half_pixel
        return not (recipe.eval_antialias or is_opencv_cubic or is_fused)

    def describe_input(self, wanted: ProgramSpec) -> str:
        """Return what a program takes, in words."""
        side = wanted.weights.recipe.eval_crop
        n = "N" if wanted.batch is None else wanted.batch
        if wanted.bare:
            return f"normalised crops of {side} x {side} pixels: float32 [{n}, 3, {side}, {side}]"
        if not self.resizes(wanted):
            return f"crops of {side} x {side} pixels: uint8 RGB [{n}, {side}, {side}, 3]"
        return f"photos of any size: uint8 RGB [{n}, H, W, 3]"

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the module. Raises `BackendError` if a package is missing."""
        if self.backend is not None:
            backends.load(self.backend)
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise self.explain_missing(error) from None
        return getattr(module, function)(*arguments)

    def explain_missing(self, error: ImportError) -> BackendError:
        """Return what to raise if a package that writes or runs the format is missing."""
        return BackendError(
            f"exporting to {self.name} needs {self.distributions[0]}: {self.install} ({error})"
        )


def _list_framework_targets() -> list[Target]:
    targets = []
    for backend, framework in FRAMEWORKS.items():
        for name, export in framework.exports.items():
            fields: dict[str, Any] = asdict(export) | {
                "module": f"lockstep.backends.{backend}.{export.module}",
                "distributions": export.distributions or framework.distributions,
                "install": export.install or framework.install,
                "takes_photos": export.phone_file is None,
            }
            targets.append(Target(**fields, name=name, backend=backend, can_run_code=True))
    return targets


_ONNX_RUNTIME = ("onnxruntime", "onnxruntime-gpu"), "pip install onnxruntime==1.31.1"
TARGETS: dict[str, Target] = {
    target.name: target
    for target in [
        *_list_framework_targets(),
        Target("write", f"{__name__}.onnx_file", *_ONNX_RUNTIME, name="onnx"),
        Target("write", f"{__name__}.triton", *_ONNX_RUNTIME, name="triton", fixes_batch=False),
        Target(
            "write",
            f"{__name__}.openvino_model",
            ("openvino",),
            "pip install openvino==2026.4.1",
            name="openvino",
            # Where a processor has bf16 instructions, OpenVINO computes in bf16 by default. A
            # resize of photos would be too, and no attribute of a model or a node forbids it.
            takes_photos=False,
        ),
        Target(
            "write",
            f"{__name__}.tensorrt_plan",
            ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
            "pip install tensorrt==11.4.0.106 cuda-bindings==13.5.0",
            name="tensorrt",
            takes_photos=False,
            takes_symmetric_int8=True,
            can_run_code=True,
        ),
    ]
}
"""The formats by name. The versions are those that are tested together (`constraints.txt`)."""
_FOR_INFERENCE = "-inference"


def find_target(name: str) -> Target:
    """Return a format; its "-inference" may be left out. Raises `CheckpointError` if there is none
    of that name."""
    name = name + _FOR_INFERENCE if name + _FOR_INFERENCE in TARGETS else name
    if name not in TARGETS:
        raise CheckpointError(f"there is no format {name!r} to export to. {nearest(name, TARGETS)}")
    return TARGETS[name]


def package(name: str, target: str) -> Any:
    """Import the package that writes or runs a format. Raises `BackendError` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TARGETS[target].explain_missing(error) from None
