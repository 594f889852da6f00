"""Export trained models to programs that run without Lockstep, on servers or phones."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import FRAMEWORKS, Framework
from lockstep.inference.card import write_card
from lockstep.inference.comparison import (
    BOUND_ELSEWHERE,
    Comparison,
    answer_photos,
    choose_backend,
    compare_program,
    explain_bound,
    find_bound,
)
from lockstep.inference.int8 import Int8, quantise
from lockstep.inference.preprocessing_file import write_preprocessing
from lockstep.inference.programs import write_description
from lockstep.inference.targets import (
    ONNX_PRECISIONS,
    PHONE_PRECISIONS,
    TARGETS,
    ProgramSpec,
    Target,
    find_target,
)
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import CheckpointError, as_path
from lockstep.system.files import appearing_folder
from lockstep.weights import Weights

_IN_MANY_PRECISIONS = ("savedmodel", "frozen-graph", "stablehlo")
"""Formats that can compute in bf16 and fp16, too."""
_USUAL = ("onnx", "torch-export", "savedmodel", "paddle-inference", "stablehlo")
"""The formats to choose from if none is named, the preferred one first."""


def export(
    weights: Weights,
    folder: str | Path,
    *,
    to: str | None,
    precision: str | Int8 | None = None,
    batch: int | None = None,
    bare: bool = False,
    compare: bool = True,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Write a program of weights; arguments and result are those of `Model.export`."""
    folder = as_path(folder, "target")
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; name a new folder")
    calibration = None
    if isinstance(precision, Int8):
        calibration = precision
        precision = "int8"
    chosen = []
    if to is None:
        target = choose_target(precision, batch, bare=bare)
        chosen = [
            f"writing {target.name}, because {target.runtime() or 'no runtime'} is installed here;"
            " --to chooses another format: lockstep export --help lists them"
        ]
    else:
        target = find_target(to)
    _check_options(target, precision, batch=batch, bare=bare)
    wanted = _plan_program(target, weights, precision, batch, bare=bare)
    remarks = [*chosen, *weights.remarks, *_remark_on_precision(target, weights, precision)]
    remarks += [*_remark_on_temperature(weights, bare=bare), *_remark_on_decoding(weights)]
    is_proved = compare and not bare
    loss = None
    if precision == "int8" and not wanted.weights.scales:
        if calibration is None:
            raise CheckpointError(
                "int8 needs images, because these weights were not trained with quantisation:"
                " --data DATA calibrates on its training images and evaluates on its validation"
                " images"
            )
        wanted, loss = quantise(target, wanted, calibration, Recorder(listener))
    if compare and target.runtime() is None:
        compare = False
        package = target.distributions[0]
        remarks.append(f"not compared with the weights; that needs {package}: {target.install}")
    comparison = _write(target, wanted, folder, precision, compare=compare, is_proved=is_proved)
    proofs = [str(path.parent) for path in sorted(folder.glob("**/proof/proof.json"))]
    proof = proofs[0] if is_proved else None
    result = {"comparison": comparison, "int8": loss, "proof": proof, "remarks": remarks}
    return _describe(target, wanted, folder) | result


def choose_target(precision: str | None, batch: int | None, *, bare: bool) -> Target:
    """Return the first usual format that has the options and that installed packages can write and
    run; if there is none, ONNX."""
    for name in _USUAL:
        target = TARGETS[name]
        with suppress(CheckpointError):
            _check_options(target, precision, batch=batch, bare=bare)
            is_written = precision in (None, "fp32") or target.backend is None
            is_written = is_written or name in _IN_MANY_PRECISIONS
            writer = Framework(("onnx",), "").version() if name == "onnx" else ""
            if is_written and writer is not None and target.runtime() is not None:
                return target
    return TARGETS["onnx"]


def _write(
    target: Target,
    wanted: ProgramSpec,
    folder: Path,
    precision: str | None,
    *,
    compare: bool,
    is_proved: bool,
) -> Comparison | None:
    """Write a program, compare it, and write its proof before it gets its name."""
    computed_in = "int8" if wanted.weights.scales else precision or "fp32"
    comparison = None
    try:
        with appearing_folder(folder) as unfinished:
            target.write(wanted, unfinished)
            write_description(unfinished, target, wanted, computed_in)
            if not target.resizes(wanted):
                recipe = wanted.weights.recipe
                write_preprocessing(unfinished, recipe, normalises=wanted.bare)
            if compare:
                comparison = compare_program(target, wanted, unfinished, precision or "fp32")
            if is_proved:
                _prove(target, wanted, unfinished, computed_in)
            is_new = wanted.quantised is not None
            write_card(unfinished, wanted.weights, target.name, comparison, is_requantised=is_new)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return comparison


def _prove(target: Target, wanted: ProgramSpec, folder: Path, precision: str) -> None:
    """Write the proof of a program into its folder."""
    from lockstep.proof.folder import Subject, write_proof

    weights = wanted.weights
    takes = "photos" if target.resizes(wanted) else "squares"
    backend = target.backend
    if FRAMEWORKS[DEFAULT_BACKEND].version() is not None:
        backend = DEFAULT_BACKEND  # others compile for minutes
    subject = Subject(
        target=target.name,
        precision=precision,
        recipe=weights.recipe,
        tensors=weights.tensors,
        scales=weights.scales,
        classes=weights.classes,
        takes=takes,
        batch=wanted.batch if target.fixes_batch else None,
        backend=choose_backend(backend, quantises=bool(weights.scales)),
        runtime=target.runtime(),
        bound=find_bound(target, wanted, precision),
        why=explain_bound(target, wanted, precision),
    )
    if wanted.quantised is not None and target.runtime() is not None:
        # Its answers only resemble those of the weights, but are the same on other machines.
        run = partial(answer_photos, target, wanted, folder)
        subject = replace(subject, run=lambda *images: run(*images)[1], bound=BOUND_ELSEWHERE)
    # Triton treats every folder of a repository as a model.
    models = list(folder.glob("*/config.pbtxt"))
    write_proof(models[0].parent if models else folder, subject)


def _describe(target: Target, wanted: ProgramSpec, folder: Path) -> dict[str, Any]:
    recipe = wanted.weights.recipe
    return {
        "source": str(wanted.weights.source),
        "written": str(folder),
        "model": recipe.fields()["model"],
        "logits": recipe.logits,
        "takes": target.describe_input(wanted),
    }


def _check_options(target: Target, precision: str | None, *, batch: int | None, bare: bool) -> None:
    """Raise `CheckpointError` if a format does not have an option. Backends check other precisions
    than int8 themselves."""
    if target.backend is None:
        if precision not in (None, *ONNX_PRECISIONS):
            raise CheckpointError(
                f"{target.name} is written in {', '.join(ONNX_PRECISIONS)}, not in {precision};"
                " leave out precision: the program that runs the model can choose its own"
            )
        return
    if target.phone_file is not None and precision not in (None, *PHONE_PRECISIONS):
        raise CheckpointError(
            f"{target.name} is written in {' or '.join(PHONE_PRECISIONS)}, not in {precision}"
        )
    options = {
        "--batch": batch is not None,
        "--bare": bare,
        "--precision int8": precision == "int8" and target.phone_file is None,
    }
    for option, is_set in options.items():
        if is_set:
            raise CheckpointError(
                f"{target.name} has no {option}; leave it out, or export to onnx, which has it"
            )


def _plan_program(
    target: Target, weights: Weights, precision: str | None, batch: int | None, *, bare: bool
) -> ProgramSpec:
    """Return what to write. Scales of weights that were trained with quantisation are used where
    the format has them. A program that computes probabilities has their temperature in its
    classifier."""
    computed_in = "fp32" if precision in (None, "int8") else precision
    batch = batch if target.phone_file is None else 1
    temperature = 1.0 if bare else weights.calibration.temperature
    weights = _divide_classifier(weights.replace_precision(computed_in), temperature)
    wanted = ProgramSpec(weights, batch, bare, temperature=temperature)
    if weights.scales and not _quantises(target, precision):
        return wanted.drop_scales()
    return wanted


def _divide_classifier(weights: Weights, temperature: float) -> Weights:
    """Return weights whose logits are divided by a temperature."""
    tensors = dict(weights.tensors)
    for name in ("fc.weight", "fc.bias"):
        tensors[name] = tensors[name] / np.float32(temperature)
    return replace(weights, state=replace(weights.state, tensors=tensors))


def _quantises(target: Target, precision: str | None) -> bool:
    """Return whether a program of weights with scales computes in int8."""
    return target.backend is None and precision in (None, "int8")


def _remark_on_precision(target: Target, weights: Weights, precision: str | None) -> list[str]:
    """Return remarks if the program computes in another precision than the weights were trained
    for."""
    remarks = []
    trained_in = weights.recipe.precision
    if precision is None and trained_in in ("bf16", "fp16"):
        remark = f"the export computes in fp32; the weights were trained in {trained_in}"
        if target.name in _IN_MANY_PRECISIONS:
            remark += f" (--precision {trained_in} keeps that)"
        remarks.append(remark)
    if weights.scales and not _quantises(target, precision):
        if precision == "int8":
            remark = "the export is quantised after training, without the scales of the weights"
        else:
            how = "export --to onnx"
            if target.backend is None:
                how = "leave out --precision or set it to int8"
            remark = (
                f"{target.name} computes in float, but the weights were trained for"
                f" {weights.recipe.quantisation}; to quantise, {how}"
            )
        remarks.append(remark)
    return remarks


def _remark_on_temperature(weights: Weights, *, bare: bool) -> list[str]:
    """Return a remark on how probabilities are calibrated, if they are."""
    if weights.calibration.temperature == 1:
        return []
    temperature = f"{weights.calibration.temperature:.9g}"
    if bare:
        return [f"for calibrated probabilities, divide the logits by {temperature} before softmax"]
    return [f"probabilities are calibrated: the classifier is divided by {temperature}"]


def _remark_on_decoding(weights: Weights) -> list[str]:
    """Return remarks on what `predict` does while it decodes a photo. A program gets pixels."""
    remarks = []
    if weights.recipe.exif_orientation:
        remarks.append(
            "the program takes pixels: first turn photos by their EXIF orientation (in Python:"
            " PIL.ImageOps.exif_transpose), as `lockstep predict` does"
        )
    if weights.recipe.dct_scaling:
        remarks.append(
            "the program takes pixels, and those of large JPEGs differ slightly from a full-size"
            " decode: `lockstep predict` decodes at 1/2, 1/4 or 1/8 of the size (dct_scaling)"
        )
    return remarks
