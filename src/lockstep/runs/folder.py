"""A run's folder.

| file | contents |
|---|---|
| recipe.yaml | every field, and `based_on` |
| environment.json | machine, versions, data |
| log.jsonl | events, one JSON object per line |
| report.json | the result; it exists once the run is finished |
| checkpoints/ | see `lockstep.weights.checkpoint` |
| tensorboard/ | the log's figures as TensorBoard events |
| validation.npz | the result for every image, see `lockstep.runs.image_results` |
| start.json, masks.safetensors | of runs from given weights, see `lockstep.runs.starting_weights` |
| dlll.json, nvidia-report.json | the files of NVIDIA's examples, if these loggers are on |
| loggers.json | the loggers' names for the run, see `lockstep.runs.loggers` |
| profile/ | traces of steps |
| logs/ | the output of launched ranks except rank 0: `rank-N.log` |
"""

import fcntl
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

import yaml

from lockstep.recipes import Recipe, difference, load_recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import write_text

LOGS = "logs"
"""The folder of the ranks' output. A launcher makes it before the run begins."""


class RunFolder:
    """A run's folder, opened for writing by one process. A context manager."""

    def __init__(
        self, path: Path, recipe: Recipe, refusal: Callable[[Recipe], str | None] | None = None
    ) -> None:
        """Prepare to open the folder of a run of `recipe`.

        `refusal` is called with the recipe of the run in the folder if that recipe is different. It
        returns None if the run can resume under the new recipe, otherwise the reason in sentences.
        Without `refusal` no such run can resume.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.changed: dict[str, tuple[Any, Any]] = {}
        """Recipe fields that change when an existing run resumes: name -> (old value, new value).
        """
        self._recipe = recipe
        self._refusal = refusal or (lambda there: "")
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Create or reopen the folder.

        Raises `RecipeError` if it holds a run of another recipe. Raises `CheckpointError` if
        another process trains in it, if it holds something else, or if it cannot be written to.
        """
        try:
            self._refuse_other_things()
            self.path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as held:
                self._take(held.enter_context((self.path / ".lock").open("w")))
                self._held = held.pop_all()
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.path}: {error.strerror}; use another --out"
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _take(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is training in {self.path}; wait for it or use another --out"
            ) from None
        name = self._check_recipe() or self._recipe.based_on
        if self.changed:
            (self.path / "report.json").unlink(
                missing_ok=True
            )  # first: this file marks the run as finished
        # Written first: this file marks the folder as a run's. Without it a killed run could not be
        # started again.
        note = yaml.safe_dump({"based_on": name}, allow_unicode=True) if name else ""
        write_text(self.path / "recipe.yaml", note + self._recipe.format_yaml())
        self.checkpoints.mkdir(exist_ok=True)

    def _refuse_other_things(self) -> None:
        if others := self.others_in(self.path):
            raise CheckpointError(
                f"{self.path} holds other things ({', '.join(others[:3])}) and no run; use a new"
                " --out"
            )

    @staticmethod
    def others_in(path: Path) -> list[str]:
        """Return the names of what a folder holds if it holds no run, apart from hidden files and
        the logs of ranks."""
        if not path.is_dir() or (path / "recipe.yaml").is_file():
            return []
        return sorted(
            entry.name
            for entry in path.iterdir()
            if entry.name != LOGS and not entry.name.startswith(".")
        )

    def _check_recipe(self) -> str:
        """Return the name of the recipe that the run was started with; "" if it has no name or
        there is no run."""
        if not holds_run(self.path):
            return ""
        there = load_recipe(self.path / "recipe.yaml")
        changed = difference(there, self._recipe)
        why = self._refusal(there) if changed else None
        if why is not None:
            raise _another_recipe(self.path, changed, why)
        self.changed = changed
        return there.based_on


def refuse_another_recipe(path: Path, recipe: Recipe, allowed: Collection[str]) -> None:
    """Raise `RecipeError` if the folder holds a run whose recipe differs in fields other than the
    `allowed` ones."""
    changed = difference(load_recipe(path / "recipe.yaml"), recipe) if holds_run(path) else {}
    if changed.keys() - set(allowed):
        raise _another_recipe(path, changed, "")


def _another_recipe(path: Path, changed: dict[str, tuple[Any, Any]], why: str) -> RecipeError:
    """Return the error that names every field that differs. `why` are sentences on why it cannot
    change."""
    lines = [f"  {name}: {old} there, {new} now" for name, (old, new) in changed.items()]
    advice = f"{why}\nUse another --out, or its recipe.".lstrip()
    return RecipeError(f"{path} holds a run of another recipe:\n" + "\n".join([*lines, advice]))


def holds_run(path: Path) -> bool:
    """Return whether a folder holds a run that has begun. A folder left by a command that then
    refused to train does not."""
    checkpoints = path / "checkpoints"
    is_fresh = (
        checkpoints.is_dir()
        and not any(checkpoints.iterdir())
        and not (path / "log.jsonl").exists()
    )
    return (path / "recipe.yaml").is_file() and not is_fresh
