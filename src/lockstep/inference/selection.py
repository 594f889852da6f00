"""Open weights to compute with, or what of an export is run instead of them."""

from dataclasses import replace
from pathlib import Path

from lockstep.inference.computation import find_exported_model
from lockstep.inference.programs import PROGRAM, ExportedProgram, find_program, find_program_to_run
from lockstep.inference.runtimes.exported import ExportedModel
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, CheckpointError, UserError
from lockstep.weights import Weights, WeightsChoice, open_weights


def is_default(choice: WeightsChoice) -> bool:
    """Return whether nothing is chosen of a source. Only then an exported program can run as it
    is."""
    is_changed = choice.ema or choice.model or choice.preprocessing or choice.ignore
    return choice.checkpoint in (None, "newest") and not is_changed


def replace_threshold(weights: Weights, unknown_below: float | None) -> Weights:
    """Return weights with a threshold; with their own if it is None. Raises `UserError` if it is
    not from 0 to 1."""
    if unknown_below is None:
        return weights
    if not 0 <= unknown_below <= 1:
        raise UserError(
            f"the threshold of unknown images is {unknown_below}; expected 0 to 1, such as 0.7"
        )
    calibration = replace(weights.calibration, unknown_below=unknown_below)
    return replace(weights, calibration=calibration)


def open_source(choice: WeightsChoice) -> Weights:
    """Return the weights of a source. For an export whose weights cannot be read, the error names
    what runs it."""
    try:
        return open_weights(choice)
    except CheckpointError as error:
        program = find_program(Path(choice.source))
        if program is None or choice.ignore or choice.model:
            raise
        trust = ""
        if program.target.can_run_code:
            trust = ", if you trust who wrote it, because it can run code"
        raise CheckpointError(
            f"{choice.source} is a program ({program.target.name}), whose weights cannot be read;"
            f" `lockstep evaluate FOLDER --runtime {PROGRAM}` runs it{trust}. Other commands take"
            f" the run, or its export to onnx ({error})"
        ) from error


def find_export(
    choice: WeightsChoice, runtime: str | None, execution: Execution
) -> ExportedModel | ExportedProgram | None:
    """Return what to run of an export as it is; None if weights are evaluated.

    Raises `BackendError` if an export is to run with something chosen.
    """
    source = Path(choice.source)
    if not is_default(choice):
        if runtime == PROGRAM:
            raise BackendError(
                f"an exported program holds what it computes; leave out --runtime {PROGRAM}, or"
                " what changes it"
            )
        return None
    if runtime != PROGRAM:
        model = find_exported_model(source, runtime, execution)
        if model is not None:
            return model
    return find_program_to_run(source, runtime, execution)
