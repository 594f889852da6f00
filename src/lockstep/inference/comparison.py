"""Compare what was exported with a backend: the same photos, once in the program's own runtime,
once in the backend's engine.

The photos have several sizes and shapes. The engine gets what `predict` makes of them.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypedDict

import numpy as np

from lockstep import backends
from lockstep.backends import FRAMEWORKS
from lockstep.inference.engines import load_engine
from lockstep.inference.targets import Answers, Program, ProgramSpec, Target
from lockstep.recipes import Execution
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, certificate
from lockstep.weights.calibration import compute_probabilities

BOUNDS = {"fp32": certificate.BOUND, "bf16": 5e-2, "fp16": 6e-3, "int8": 0.3, "int8, trained": 5e-2}
"""By precision: logits may differ from the engine's, which computes in fp32, by this share of the
largest logit.

- fp32: the bound of certificates: two programs in fp32 are each within 5e-5 of float64.
- bf16, fp16: what `lockstep verify` allows (`lockstep.verification.bounds`): 8 and 11 bits a layer.
- int8: only finds models that compute something else; the loss of top-1 decides.
- "int8, trained": the integers are equal, unless float32's rounding decides one (1.2e-2 with
  ResNet-50).
"""
BOUND_ELSEWHERE = 3e-2
"""The bound for a program that was quantised after training, and its own answers on another
processor. With ResNet-50 in ONNX Runtime and OpenVINO, AVX512-VNNI and AVX2 (emulated) differ by
4e-8; AMX was not measured. Float32's rounding could decide some integers, as in trained ones."""
_REASONS = {
    "fp32": "two programs in fp32 are each within 5e-5 of float64",
    "bf16": "bf16 rounds every layer to 8 bits",
    "fp16": "fp16 rounds every layer to 11 bits",
    "int8": "AVX2 and VNNI gave equal integers; AMX was not measured; rounding may change some",
}
"""Why an answer in a precision may differ."""
_PIXEL_BOUND = 5e-3
"""The bound if a program rounds some pixels differently, by one level of 255."""
_SMALLEST = 0.1
"""Differences are a share of at least this logit: float32 does not resolve probabilities that
differ by less than 1e-5."""
_REFERENCE = "reference"
_LEAST_COMPARED = 1e-30
"""Smaller probabilities are replaced by this one: float32 soon has no numbers below it."""


class Comparison(TypedDict):
    """What was compared, and how."""

    runtime: str
    """Name and version of what ran the exported program."""
    backend: str
    """Name of the backend and version of its framework."""
    images: int
    sizes: list[list[int]]
    """Height and width of what the program got, in pixels: of all photos, or of the squares that it
    takes."""
    largest_difference: float
    """The largest difference of two logits, or logarithms of probabilities, as a share of the
    largest logit."""
    bound: float
    top1_agreement: float
    """Share of the images whose most likely class is the same."""
    seconds: float
    """How long the comparison took."""


def compare_program(
    target: Target, wanted: ProgramSpec, folder: Path, precision: str
) -> Comparison:
    """Compare the program in `folder` with an engine in fp32, which quantises if the weights have
    scales.

    The engine is that of the framework that the format belongs to; for ONNX it is PyTorch's, or
    another one that is installed. Raises `CheckpointError` if they differ by more than the bound of
    `precision`.
    """
    began = time.perf_counter()
    weights = wanted.weights.replace_precision("fp32")
    photos = certificate.draw_photos(weights.recipe)
    squares = certificate.read_squares(photos, weights.recipe)
    backend = choose_backend(target.backend, quantises=bool(weights.scales))
    with open_engine(weights, backend) as engine:
        _, logits = engine(squares)
    if not np.isfinite(logits).all():
        raise CheckpointError(
            f"{weights.source} computes logits that are not finite numbers, so the export cannot be"
            " compared. Nothing is written; --no-compare writes it anyway"
        )
    classes, answered = answer_photos(target, wanted, folder, photos, squares)
    expected = _take_logarithms(logits, is_logits=True)
    largest = float(np.nan_to_num(np.abs(answered - expected), nan=np.inf).max()) / max(
        float(np.abs(logits).max()), _SMALLEST
    )
    bound = find_bound(target, wanted, precision)
    runtime = target.runtime()
    backend_version = f"{backend} {FRAMEWORKS[backend].version()}"
    if not largest <= bound:
        raise CheckpointError(
            f"the export in {runtime} and the weights in {backend_version} differ by {largest:.1e}"
            f" of the largest logit, expected at most {bound:.0e}. Nothing is written; --no-compare"
            " writes it anyway"
        )
    if not (answered[np.arange(len(classes)), classes] == answered.max(axis=1)).all():
        raise CheckpointError(
            f"the export's classes are not its most probable ones ({runtime}). Nothing is written"
        )
    inputs = photos if target.resizes(wanted) else squares[:1]
    return {
        "runtime": str(runtime),
        "backend": backend_version,
        "images": len(photos),
        "sizes": [list(pixels.shape[:2]) for pixels in inputs],
        "largest_difference": largest,
        "bound": bound,
        "top1_agreement": float((classes == logits.argmax(axis=1)).mean()),
        "seconds": time.perf_counter() - began,
    }


def answer_photos(
    target: Target,
    wanted: ProgramSpec,
    folder: Path,
    photos: Sequence[np.ndarray],
    squares: np.ndarray,
) -> Answers:
    """Return the classes and the logarithms of probabilities, float64 [N, logits], that a program
    returns for photos, or for the squares cut from them, whichever it takes."""
    batches = [photo[None] for photo in photos] if target.resizes(wanted) else [squares]
    with target.open_program(wanted.inputs(), folder) as program:
        answers = [program(batch) for batch in batches]
    classes, values = (np.concatenate(parts) for parts in zip(*answers, strict=True))
    return classes, _take_logarithms(values, is_logits=wanted.bare)


def find_bound(target: Target, wanted: ProgramSpec, precision: str) -> float:
    """Return by which share of the largest logit a program may differ from an engine."""
    bound = BOUNDS["int8, trained" if wanted.weights.scales else precision]
    return bound if target.has_equal_pixels(wanted) else max(bound, _PIXEL_BOUND)


def explain_bound(target: Target, wanted: ProgramSpec, precision: str) -> str:
    """Return the reason of the bound, in words."""
    if target.has_equal_pixels(wanted):
        return _REASONS[precision]
    return f"{_REASONS[precision]}; the program rounds some pixels by one level of 255"


def choose_backend(backend: str | None, *, quantises: bool, explains: bool = False) -> str:
    """Return the backend to compute with: `backend`, or the first that is installed and, if asked
    for, computes int8 or Grad-CAM; the reference in NumPy is the last."""
    names = [backend] if backend else [DEFAULT_BACKEND, *FRAMEWORKS]
    for name in names:
        framework = FRAMEWORKS[name]
        is_able = framework.quantises >= quantises and framework.explains >= explains
        if name != _REFERENCE and framework.version() and is_able:
            return name
    return _REFERENCE


@contextmanager
def open_engine(weights: Weights, backend: str) -> Iterator[Program]:
    """Yield a backend's engine, which answers squares, uint8 [N, S, S, 3], with classes and logits,
    float64."""
    execution = Execution(backend=backend, reference_dtype="float32", compile="off")
    with (
        closing(backends.load(backend).world(execution)) as world,
        load_engine(weights, world, execution) as engine,
    ):

        def answer(squares: np.ndarray) -> Answers:
            logits = engine.predict(squares).astype(np.float64)
            return logits.argmax(axis=1), logits

        yield answer


def _take_logarithms(values: np.ndarray, *, is_logits: bool) -> np.ndarray:
    """Return the logarithms of probabilities, float64; very small ones are raised to a limit."""
    values = values.astype(np.float64)
    if is_logits:
        values = compute_probabilities(values)
    return np.log(np.maximum(values, _LEAST_COMPARED))
