"""Which weights of a source are used, and what of an export is run instead of them."""

from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.inference.computation import find_exported_model
from lockstep.inference.programs import PROGRAM, ExportedProgram, find_program, find_program_to_run
from lockstep.inference.runtimes.exported import ExportedModel
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, CheckpointError, UserError
from lockstep.weights import Preprocessing, Weights, open_weights


@dataclass(frozen=True)
class Selection:
    """What is chosen of a source. The fields are arguments of `lockstep.predict`."""

    checkpoint: str | None = None
    ema: bool | None = None
    model: str | None = None
    preprocessing: Preprocessing | None = None
    unknown_below: float | None = None

    def is_default(self) -> bool:
        """Return whether nothing is chosen. Only then an exported program can run as it is."""
        is_changed = self.ema or self.model or self.preprocessing
        return self.checkpoint in (None, "newest") and not is_changed

    def replace_threshold(self, weights: Weights) -> Weights:
        """Return weights with the chosen threshold; with their own if none is chosen. Raises
        `UserError` if it is not from 0 to 1."""
        if self.unknown_below is None:
            return weights
        if not 0 <= self.unknown_below <= 1:
            raise UserError(
                f"the threshold of unknown images is {self.unknown_below}; expected 0 to 1, such as"
                " 0.7"
            )
        calibration = replace(weights.calibration, unknown_below=self.unknown_below)
        return replace(weights, calibration=calibration)

    def open_weights(self, source: str | Path) -> Weights:
        """Return the weights of a source. For an export whose weights cannot be read, the error
        names what runs it."""
        try:
            return open_weights(
                source,
                checkpoint=self.checkpoint,
                ema=self.ema,
                model=self.model,
                preprocessing=self.preprocessing,
            )
        except CheckpointError as error:
            program = find_program(Path(source))
            if program is None:
                raise
            trust = ""
            if program.target.can_run_code:
                trust = ", if you trust who wrote it, because it can run code"
            raise CheckpointError(
                f"{source} is a program ({program.target.name}), whose weights cannot be read;"
                f" `lockstep evaluate FOLDER --runtime {PROGRAM}` runs it{trust}. Other commands"
                f" take the run, or its export to onnx ({error})"
            ) from error


def find_export(
    source: Path, runtime: str | None, execution: Execution, selection: Selection
) -> ExportedModel | ExportedProgram | None:
    """Return what to run of an export as it is; None if weights are evaluated.

    Raises `BackendError` if an export is to run with something chosen.
    """
    if not selection.is_default():
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
