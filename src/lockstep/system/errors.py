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
from collections.abc import Iterable

EXIT_DIVERGED = 3
EXIT_SAVED_AND_STOPPED = 75  # EX_TEMPFAIL: start the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class LockstepError(Exception):
    """Any error Lockstep raises on purpose."""

    exit_code = 1


class UserError(LockstepError):
    """Something the user gave is wrong."""

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
