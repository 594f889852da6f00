"""Errors, their causes, and the exit codes of the command line.

    LockstepError
    ├── UserError                 exit 2: an input is wrong; the message says what to change
    │   ├── RecipeError           a recipe, a field or a value
    │   ├── DataError             images, folders, the index
    │   ├── CheckpointError       a run's folder, a checkpoint, a weights file
    │   └── BackendError          a framework or a device is missing
    ├── DivergedError             exit 3: a loss or a score is not a finite number
    └── Interrupted               exit 75 or 130: stopped on request, everything saved

A message says what happened, what was expected and what to do. `assert` is only for mistakes in
Lockstep's own code.
"""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

EXIT_DIVERGED = 3
EXIT_SAVED_AND_STOPPED = 75  # EX_TEMPFAIL: start the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class LockstepError(Exception):
    """Any error Lockstep raises on purpose; `exit_code` is that of the command.

    >>> import lockstep
    >>> try: lockstep.load("missing")
    ... except lockstep.LockstepError as error: error.exit_code
    2
    """

    exit_code = 1


class UserError(LockstepError):
    """Something you gave is wrong; the message says what to change.

    >>> import lockstep
    >>> lockstep.UserError.exit_code
    2
    """

    exit_code = 2


class RecipeError(UserError):
    """A recipe, one of its fields or a value is wrong."""


class DataError(UserError):
    """Images, a folder of images or an index cannot be used."""


class CheckpointError(UserError):
    """A run's folder, a checkpoint or a weights file cannot be used."""


class BackendError(UserError):
    """A framework or a device is missing."""


class DivergedError(LockstepError):
    """A loss, a score or a weight is NaN or infinite."""

    exit_code = EXIT_DIVERGED


class Interrupted(LockstepError):
    """The run was asked to stop, saved its state and stopped."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that lists the known names most similar to `name`, or all of them if none
    is similar.

    >>> nearest("epoch", ["epochs", "seed"])
    'Did you mean epochs?'
    >>> nearest("zzz", ["epochs", "seed"])
    'Known: epochs, seed.'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join(known)}."


Role = Literal["data", "folder", "out", "recipe", "runs", "target", "weights"]

_EXPECTED: dict[Role, str] = {
    "data": "a path or an address of a data set; lockstep.pack(samples, FOLDER) writes one from"
    " images and labels of any dataset",
    "folder": "the path of one run's folder; lockstep.report takes several",
    "out": "the path of a run's folder",
    "recipe": "a name, a file or a lockstep.Recipe; single fields go to changes={...}",
    "runs": "the folder of a run, or a list of them",
    "target": "the path to write",
    "weights": "a path or a name",
}
_OF_MODULE = (
    "a path or a name; torch.save(module.state_dict(), FILE) writes a module's weights to a file."
    " Lockstep does not train networks or losses of other libraries (docs/how-to/python.md)"
)


def as_path(value: object, role: Role) -> Path:
    """Return a path that a user gave as this argument.

    Raises `UserError` with what to do instead if it is not a path: a module, a loader, a dataset,
    a model, a report.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    article = "an" if kind[0] in "aeiou" else "a"
    kind = "None" if value is None else f"{article} {kind}"
    expected = _EXPECTED[role]
    if role == "weights" and isinstance(value, dict) and "best_checkpoint" in value:
        expected = 'a path or a name; for a report give report["best_checkpoint"]'
    elif role == "weights" and isinstance(value, dict):
        expected = "a path or a name; torch.save(weights, FILE) writes a file of tensors by name"
    elif role == "weights" and hasattr(value, "best_checkpoint"):
        expected = "a path or a name; for a run give run.folder"
    elif role == "weights" and hasattr(value, "state_dict"):
        expected = _OF_MODULE
    elif role == "weights" and hasattr(value, "predict") and hasattr(value, "train"):
        expected = "a path or a name; to train a loaded model, call model.train(DATA, out=RUN)"
    raise UserError(f"{role} is {kind}; expected {expected}")
