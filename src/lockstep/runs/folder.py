"""The folder of a run.

recipe.yaml        every field, and `based_on`     log.jsonl     what happened, one JSON object a line
environment.json   machine, versions, data         report.json   the result, once the run is finished
checkpoints/       see `lockstep.weights.checkpoint`       tensorboard/  the same figures as events
validation.npz     the result for every image, see `lockstep.runs.image_results`
start.json, masks.safetensors: of runs from given weights, see `lockstep.runs.given_weights`
loggers.json: what loggers call the run, see `lockstep.runs.loggers`; profile/: traces of steps
"""

import fcntl
import platform
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TextIO

import yaml

from lockstep.backends import FRAMEWORKS
from lockstep.recipes import Recipe, difference, load_recipe
from lockstep.runs import shapes
from lockstep.system.checks import parsed
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import write_text
from lockstep.system.machine import cores, memory_bytes, processor
from lockstep.system.version import version as lockstep_version


class RunFolder:
    """A run's folder, opened for writing by one process; a context manager."""

    def __init__(self, path: Path, recipe: Recipe, refusal: Callable[[Recipe], str | None] | None = None) -> None:
        """`refusal` tells why the run that is there, of the recipe it is called with, cannot go on under another recipe, in
        sentences; None if it can. Without it no run can.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.changed: dict[str, tuple[Any, Any]] = {}
        """Fields of the recipe in which a run that is there goes on with other values: those before, and the new ones."""
        self._recipe = recipe
        self._refusal = refusal or (lambda there: "")
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Create or reopen the folder.

        Raises `RecipeError` if it holds a run of another recipe, `CheckpointError` if another process trains in it, it
        holds something else or cannot be written to.
        """
        try:
            self._refuse_other_things()
            self.path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as held:
                self._take(held.enter_context((self.path / ".lock").open("w")))
                self._held = held.pop_all()
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path}: {error.strerror}; use another --out") from None
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _take(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is training in {self.path}; wait for it or use another --out") from None
        name = self._check_recipe() or self._recipe.based_on
        if self.changed:
            (self.path / "report.json").unlink(missing_ok=True)  # first: it says that the run is finished
        # First of all files: without it a folder is not a run's, and a killed run could not be started again.
        note = yaml.safe_dump({"based_on": name}, allow_unicode=True) if name else ""
        write_text(self.path / "recipe.yaml", note + self._recipe.to_yaml())
        self.checkpoints.mkdir(exist_ok=True)

    def _refuse_other_things(self) -> None:
        if not self.path.is_dir() or (self.path / "recipe.yaml").is_file():
            return
        others = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        if others:
            raise CheckpointError(f"{self.path} holds other things ({', '.join(others[:3])}) and no run; use a new --out")

    def _check_recipe(self) -> str:
        """Return the name of the recipe that the run was started with; "" if it noted none or there is no run."""
        if not holds_run(self.path):
            return ""
        there = load_recipe(self.path / "recipe.yaml")
        changed = difference(there, self._recipe)
        why = self._refusal(there) if changed else None
        if why is not None:
            lines = [f"  {name}: {old} there, {new} now" for name, (old, new) in changed.items()]
            advice = f"{why}\nUse another --out, or its recipe.".lstrip()
            raise RecipeError(f"{self.path} holds a run of another recipe:\n" + "\n".join([*lines, advice]))
        self.changed = changed
        return there.based_on


def holds_run(path: Path) -> bool:
    """Return whether a folder holds a run that has begun: one that a command made and then refused to train does not."""
    checkpoints = path / "checkpoints"
    is_fresh = checkpoints.is_dir() and not any(checkpoints.iterdir()) and not (path / "log.jsonl").exists()
    return (path / "recipe.yaml").is_file() and not is_fresh


def read_report(path: Path) -> dict[str, Any] | None:
    """Return the report of a finished run; None if it is not finished, or the file holds something else."""
    try:
        report: dict[str, Any] = parsed((path / "report.json").read_bytes())
    except (OSError, ValueError):
        return None
    return report if shapes.is_report(report) else None


def read_environment(path: Path) -> dict[str, Any]:
    """Return what a run noted of its environment when it last began; empty if it never did. Raises `CheckpointError`."""
    file = path / "environment.json"
    try:
        found: dict[str, Any] = parsed(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise CheckpointError(f"{file} is not JSON; restore it or remove it") from None
    if not shapes.is_environment(found):
        raise CheckpointError(f"{file} is not what a run notes of its environment; restore it or remove it")
    return found


def environment(backend: str) -> dict[str, Any]:
    """Return what numbers and speed depend on outside the recipe: versions, processor, cores."""
    framework = FRAMEWORKS[backend]
    return {
        "lockstep": lockstep_version(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        backend: framework.version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }
