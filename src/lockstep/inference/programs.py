"""Exported programs as they are deployed: found by their description, opened in their own runtime,
evaluated on photos.

`export.json`, which `lockstep export` writes next to every program, describes it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference.runtimes import NATIVE
from lockstep.inference.runtimes.scores import compute_scores
from lockstep.inference.session import Session
from lockstep.inference.targets import TARGETS, Inputs, Program, ProgramSpec, Target
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import BackendError, CheckpointError, LockstepError, RecipeError
from lockstep.system.regular_files import TEXT, WEIGHTS, check_regular, read_regular
from lockstep.system.strict_json import is_count, is_list_of, is_text, parsed, to_json
from lockstep.weights import LOCKSTEP, Weights
from lockstep.weights.formats import onnx_metadata

FILE = "export.json"
_SMALLEST_FLOAT32 = 1e-45
"""Smaller probabilities are replaced by this one: float32 has no numbers below it."""


def write_description(folder: Path, target: Target, wanted: ProgramSpec, precision: str) -> None:
    """Write `export.json`: the target, what the program takes, its preprocessing, precision and
    classes."""
    recipe = wanted.weights.recipe
    description = {
        "target": target.name,
        "takes": "photos" if target.resizes(wanted) else "squares",
        "bare": wanted.bare,
        "batch": wanted.batch if target.fixes_batch else None,
        "precision": precision,
        "logits": recipe.logits,
        "temperature": wanted.temperature,
        "unknown_below": wanted.weights.calibration.unknown_below,
        "validation_share": recipe.validation_share,
        "classes": list(wanted.weights.classes),
        "ignored": list(wanted.weights.ignored),
        "preprocessing": wanted.weights.describe_preprocessing(),
    }
    (folder / FILE).write_text(to_json(description, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ExportedProgram:
    """A program that `lockstep export` wrote."""

    target: Target
    folder: Path
    about: Weights
    """Preprocessing and classes, without weights. The recipe's precision is fp32, its model any."""
    inputs: Inputs
    takes_photos: bool
    precision: str
    """The precision that it computes in."""

    @property
    def runtime(self) -> str:
        """The name of what runs it, such as "torchscript (torch 2.13.0)"."""
        return f"{self.target.name} ({self.target.runtime()})"

    def check_options(self, precision: str | None, *, ranks: int) -> None:
        """Raise `BackendError` for a precision or several processes."""
        if precision is not None:
            raise BackendError(
                f"{self.folder} computes in {self.precision}; leave out precision, or add"
                f" --runtime {NATIVE}"
            )
        if ranks > 1:
            raise BackendError(
                "an exported program computes in one process; start it without a launcher"
            )

    @contextmanager
    def open_session(self, weights: Weights, listener: Listener | None) -> Iterator[Session]:
        """Yield the program in its own runtime. `weights` are `about`, with what a user chose.

        Raises `BackendError` if the runtime is missing, and `CheckpointError` if it cannot run the
        program.
        """
        if self.target.runtime() is None:
            raise BackendError(
                f"{self.folder} needs {self.target.distributions[0]}: {self.target.install}"
            )
        self._check_files()
        with ExitStack() as stack:
            with self._translate_errors():
                program = stack.enter_context(self.target.open_program(self.inputs, self.folder))
            predict = partial(self._predict, program)
            yield Session(
                self.runtime,
                weights,
                Recorder(listener),
                partial(compute_scores, predict),
                predict,
                precision=self.precision,
                takes_photos=self.takes_photos,
            )

    def _predict(self, program: Program, images: np.ndarray) -> np.ndarray:
        """Return logits, or logarithms of probabilities, float64 [N, logits], of uint8 images of
        one size."""
        with self._translate_errors():
            _, values = program(images)
        expected = len(images), self.about.recipe.logits
        if values.shape != expected:
            raise CheckpointError(
                f"{self.folder} returns an array {list(values.shape)}, expected"
                f" {list(expected)} as its {FILE} says; export it again"
            )
        if self.inputs.bare:
            return values.astype(np.float64)
        return np.log(np.maximum(values.astype(np.float64), _SMALLEST_FLOAT32))

    def _check_files(self) -> None:
        """Raise `CheckpointError` if a file is not regular: runtimes open files by their paths."""
        for path in self.folder.rglob("*"):
            try:
                if not path.is_dir():
                    check_regular(path, WEIGHTS)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of the runtime, which have no common base, into `CheckpointError`."""
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{self.runtime} cannot run {self.folder}: {reason:.300}; export it again"
            ) from error


def find_program(source: Path) -> ExportedProgram | None:
    """Return the program in a folder of `lockstep export`; None if there is none.

    Raises `CheckpointError` if its description cannot be used.
    """
    file = source / FILE
    if not file.is_file():
        return None
    try:
        return _read(file)
    except (OSError, ValueError, LookupError, TypeError, RecipeError) as error:
        raise CheckpointError(
            f"{file} does not describe an export: {error}; export the weights again"
        ) from None


def _read(file: Path) -> ExportedProgram:
    """Return the program that a file describes. Raises the errors that `find_program` turns into
    one."""
    values: Any = parsed(read_regular(file, TEXT))
    target = TARGETS[values["target"]]
    batch = values["batch"]
    classes = values["classes"]
    is_known = values["takes"] in ("photos", "squares") and isinstance(values["bare"], bool)
    if not is_known or not is_list_of(is_text)(classes) or not is_text(values["precision"]):
        raise ValueError("expected the fields that lockstep export writes")
    if batch is not None and not (is_count(batch) and batch > 0):
        raise ValueError(f"batch is {batch!r:.40}, expected a number of images or null")
    fields = {name: values[name] for name in ("logits", "validation_share")}
    preprocessing = to_json(values["preprocessing"])
    recipe = onnx_metadata.apply_preprocessing(
        Recipe.of({"precision": "fp32"} | fields), preprocessing, normalises=False
    )
    if len(classes) > recipe.logits:
        raise ValueError(
            f"it names {len(classes)} classes, but the model has {recipe.logits} logits"
        )
    about = Weights(recipe, State(0, {}, {}), tuple(classes), file.parent, LOCKSTEP)
    inputs = Inputs(batch, values["bare"], recipe.mean, recipe.std)
    return ExportedProgram(
        target, file.parent, about, inputs, values["takes"] == "photos", values["precision"]
    )
