"""Exported programs as they are deployed: found by their description, opened in their own runtime, evaluated on photos.

`export.json`, which `lockstep export` writes next to every program, describes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.inference.images import read_photo
from lockstep.inference.targets import TARGETS, Inputs, Program, Target, Wanted
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError, CheckpointError, RecipeError
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_count, is_list_of, is_text, parsed, to_json
from lockstep.weights.formats import onnx_metadata
from lockstep.weights.opening import LOCKSTEP, Opened

FILE = "export.json"
_UNLIKELY = 1e-30
"""Smaller probabilities are taken for this one: a program's softmax has none below it."""


def write_description(folder: Path, target: Target, wanted: Wanted, precision: str) -> None:
    """Write `export.json`: the target, what the program takes, its preprocessing, precision and classes."""
    recipe = wanted.weights.recipe
    description = {
        "target": target.name,
        "takes": "photos" if target.resizes(wanted) else "squares",
        "bare": wanted.bare,
        "batch": wanted.batch if target.fixes_batch else None,
        "precision": precision,
        "logits": recipe.logits,
        "classes": list(wanted.weights.classes),
        "preprocessing": parsed(onnx_metadata.preprocessing_of(recipe)),
    }
    (folder / FILE).write_text(to_json(description, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ExportedProgram:
    """A program that `lockstep export` wrote."""

    target: Target
    folder: Path
    about: Opened
    """Preprocessing and classes, without weights. The recipe's precision is fp32, its model any."""
    inputs: Inputs
    takes_photos: bool
    precision: str
    """The precision that it computes in."""

    @property
    def engine(self) -> str:
        """The name of what runs it, such as "torchscript (torch 2.13.0)"."""
        return f"{self.target.name} ({self.target.runtime()})"

    @contextmanager
    def load(self) -> Iterator["ProgramEngine"]:
        """Yield the program in its own runtime."""
        with self.target.open_program(self.inputs, self.folder) as program:
            yield ProgramEngine(program, is_bare=self.inputs.bare)


class ProgramEngine:
    """A program as evaluations use it."""

    def __init__(self, program: Program, *, is_bare: bool) -> None:
        self._program = program
        self._is_bare = is_bare

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, or logarithms of probabilities, float64 [N, logits], of uint8 images of one size."""
        _, values = self._program(images)
        if self._is_bare:
            return values.astype(np.float64)
        return np.log(np.maximum(values.astype(np.float64), _UNLIKELY))


def find_program(source: Path) -> ExportedProgram | None:
    """Return the program in a folder of `lockstep export`; None if there is none, or its runtime is not installed.

    Raises `CheckpointError` if its description cannot be used.
    """
    file = source / FILE
    if not file.is_file():
        return None
    try:
        description = _read(file)
    except (OSError, ValueError, LookupError, TypeError, RecipeError) as error:
        raise CheckpointError(f"{file} does not describe an export: {error}; export the weights again") from None
    return None if description.target.runtime() is None else description


def _read(file: Path) -> ExportedProgram:
    """Return the program that a file describes. Raises the errors that `find_program` turns into one."""
    values: Any = parsed(read_regular(file, TEXT))
    target = TARGETS[values["target"]]
    batch = values["batch"]
    classes = values["classes"]
    is_known = values["takes"] in ("photos", "squares") and isinstance(values["bare"], bool)
    if not is_known or not is_list_of(is_text)(classes) or not is_text(values["precision"]):
        raise ValueError("expected the fields that lockstep export writes")
    if batch is not None and not (is_count(batch) and batch > 0):
        raise ValueError(f"batch is {batch!r:.40}, expected a number of images or null")
    preprocessing = values["preprocessing"]
    colours = {name: preprocessing[name] for name in ("mean", "std")}
    recipe = Recipe.of({"precision": "fp32", "logits": values["logits"]} | colours)
    recipe = onnx_metadata.with_preprocessing(recipe, to_json(preprocessing))
    about = Opened(recipe, State(0, {}, {}), tuple(classes), file.parent, LOCKSTEP)
    inputs = Inputs(batch, values["bare"], recipe.mean, recipe.std)
    return ExportedProgram(target, file.parent, about, inputs, values["takes"] == "photos", values["precision"])


def check_alone(ranks: int) -> None:
    """Raise `BackendError` if several processes evaluate."""
    if ranks > 1:
        raise BackendError("an exported program computes in one process; start it without a launcher")


def group_photos(sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the places of photos that follow each other and have one size, at most `most` together.

    `sizes` are heights and widths: int64 [N, 2].

    >>> group_photos(np.array([[4, 3], [4, 3], [4, 3], [5, 3]]), 2)
    [array([0, 1]), array([2]), array([3])]
    """
    changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
    groups = []
    for run in np.split(np.arange(len(sizes)), changes):
        groups += [run[start : start + most] for start in range(0, len(run), most)]
    return groups


def load_photos(index: Index, recipe: Recipe, groups: list[np.ndarray]) -> Iterator[Batch]:
    """Yield batches of whole photos, turned as the recipe says. Raises `DataError` that names the file."""
    for group in groups:
        photos = []
        for sample in group.tolist():
            try:
                photos.append(read_photo(index.read(sample), recipe))
            except ValueError as error:
                raise index.changed(sample, str(error)) from None
        yield Batch(np.stack(photos), index.labels(group))
