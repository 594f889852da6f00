"""A run's folder.

| file | contents |
|---|---|
| recipe.yaml | every field, and `based_on` |
| run.json | the id of the run, see `lockstep.weights.run_identity` |
| environment.json | machine, versions, data |
| log.jsonl | events, one JSON object per line |
| report.json | the result; it exists once the run is finished |
| checkpoints/ | see `lockstep.weights.checkpoint` |
| tensorboard/ | the log's figures as TensorBoard events |
| validation.npz | the last result for every image, see `lockstep.runs.image_results` |
| best-validation.npz | the same of the best evaluation |
| start.json, masks.safetensors | of runs from given weights, see `lockstep.runs.starting_weights` |
| dlll.json, nvidia-report.json | the files of NVIDIA's examples, if these loggers are on |
| loggers.json | the loggers' names for the run, see `lockstep.runs.loggers` |
| profile/ | traces of steps |
| logs/ | the output of launched ranks except rank 0: `rank-N.log` |
"""

import fcntl
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from lockstep.data.images import printable
from lockstep.data.sources import find_url
from lockstep.data.split import choose_share
from lockstep.recipes import Recipe, difference, load_recipe
from lockstep.recipes.field_validation import format_value, list_changes, shorten_text
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import write_text
from lockstep.system.strict_json import is_list_of, is_text
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import FILE, settle_identity

LOGS = "logs"
"""The folder of the ranks' output. A launcher makes it before the run begins."""
Changed = dict[str, tuple[Any, Any]]
"""Recipe fields that differ: name -> (value in the folder, new value)."""


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the classes of a run by its labels; none if no checkpoint of it can be read."""
    checkpoints = path / "checkpoints"
    for step in reversed(checkpoint.steps(checkpoints)):
        folder = checkpoint.checkpoint_path(checkpoints, step)
        with suppress(CheckpointError):
            about = checkpoint.read_metadata(checkpoint.find_weights_file(folder, ema=False)) or {}
            if is_list_of(is_text)(about.get("classes")):
                return tuple(about["classes"])
    return ()


@contextmanager
def open_run_folder(
    path: Path, recipe: Recipe, explain_refusal: Callable[[Recipe], str | None] = lambda there: ""
) -> Iterator[Changed]:
    """Create or reopen the folder of a run of `recipe`, for writing by this process alone. Yield
    the recipe fields that change when an existing run resumes.

    `explain_refusal` is called with the recipe of the run in the folder if that recipe is
    different. It returns None if the run can resume under the new recipe, otherwise the reason in
    sentences. By default no such run can resume.

    Raises `RecipeError` if it holds a run of a different recipe. Raises `CheckpointError` if
    another process trains in it, if it holds something else, or if it cannot be written to.
    """
    with ExitStack() as held:
        try:
            others = list_other_things(path)
            if others:
                names = f"({', '.join(others[:3])})"
                raise CheckpointError(
                    f"{path} holds other files {names} but no run; use a new --out"
                )
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_run(path))
            refuse_slim(path)
            changed = _write_recipe(path, recipe, explain_refusal)
            settle_identity(path)
        except OSError as error:
            reason = f"cannot write to {path}: {error.strerror}"
            raise CheckpointError(f"{reason}; use another --out") from None
        yield changed


def list_other_things(path: Path) -> list[str]:
    """Return the names of what a folder holds if it holds no run, apart from hidden files, the id
    of a run and the logs of ranks."""
    if not path.is_dir() or (path / "recipe.yaml").is_file():
        return []
    names = sorted(entry.name for entry in path.iterdir())
    return [name for name in names if name not in (LOGS, FILE) and not name.startswith(".")]


@contextmanager
def hold_run(path: Path) -> Iterator[None]:
    """Hold the lock of a run's folder in the block. Raises `CheckpointError` if another process
    holds it, and `OSError`, also if the lock is a link."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is training in {path}; wait for it or use another --out"
            ) from None
        yield


def refuse_slim(folder: Path) -> None:
    """Raise `CheckpointError` if the run in a folder cannot resume, because it was made small
    (`lockstep.runs.slim`)."""
    checkpoints = folder / "checkpoints"
    saved = checkpoint.steps(checkpoints)
    if saved and checkpoint.is_slim(checkpoint.checkpoint_path(checkpoints, saved[-1])):
        raise CheckpointError(
            f"{folder} cannot resume: `lockstep runs slim` removed the velocities of its"
            f" checkpoints. To train on, start a new run from its weights: {suggest_run(folder)}"
        )


def suggest_run(weights: Path, data: str | Path = "DATA") -> str:
    """Return the command that trains a new run from a run's weights, in a folder that is free. It
    holds out the same share of the images: the weights were not trained on these.

    >>> suggest_run(Path("my runs/a"), "photos2")
    "lockstep train --weights 'my runs/a' --data photos2 --out 'my runs/a2'"
    """
    own = weights.with_suffix("") if weights.is_file() else weights
    if own.parent.name == "checkpoints":
        own = own.parents[1]
    words = ["lockstep", "train", "--weights", str(weights), "--data", _name_data(data)]
    share = 0.0
    if (own / "recipe.yaml").is_file():
        share = load_recipe(own / "recipe.yaml").validation_share
    words += ["--out", _name_free(own)]
    if share and choose_share(Path(_name_data(data))) not in (0, share):
        words += ["--split", f"{share:g}"]
    return shlex.join(map(printable, words))


def suggest_folds(run: Path, data: str | Path) -> str:
    """Return the command of a cross-validation on all images of a data set, from the published
    weights that a run started from, or from none: other weights may have seen the images."""
    from lockstep.runs.starting_weights import read_start
    from lockstep.weights.known_weights import read_known_weights

    words = ["lockstep", "train", "--data", _name_data(data), "--folds", "5"]
    if (run / "start.json").is_file():
        start = read_start(run)["weights"]
        for name, known in read_known_weights().items():
            if known.file_name == start:
                words.append(f"--weights={name}")
    return shlex.join(map(printable, [*words, "--out", _name_free(run)]))


def _name_data(data: str | Path) -> str:
    """Return a data set as a command names it, without the password that an address may hold."""
    return str(data) if find_url(data) is None else "DATA"


def _name_free(path: Path) -> str:
    """Return a path that is free next to a run: run2 for run and run1, r18-2 for r18, and a
    neighbour of the whole for a run in the folder of a cross-validation."""
    if (path / "recipe.yaml").is_file() and load_recipe(path / "recipe.yaml").folds:
        path = path.parent
    if path.name in ("", ".."):
        path = path.resolve()
    counted = re.fullmatch(r"(.*\D)([1-9]|(?<=[-_ ])[1-9][0-9])", str(path))
    stem = f"{path}-" if path.name[-1:].isdigit() else str(path)
    number = 2
    if counted is not None:
        stem = counted[1]
        number = int(counted[2]) + 1
    while os.path.lexists(f"{stem}{number}"):
        number += 1
    return f"{stem}{number}"


def _write_recipe(
    path: Path, recipe: Recipe, explain_refusal: Callable[[Recipe], str | None]
) -> Changed:
    name = recipe.based_on
    changed: Changed = {}
    if holds_run(path):
        there = load_recipe(path / "recipe.yaml")
        name = there.based_on or name  # the one that the run was started with
        changed = difference(there, recipe)
    if changed:
        reason = explain_refusal(there)
        if reason is not None:
            raise _make_recipe_error(path, changed, reason)
        (path / "report.json").unlink(missing_ok=True)  # this file marks the run as finished
    # Written first: this file marks the folder as a run's. Without it a killed run could not be
    # started again.
    note = yaml.safe_dump({"based_on": name}, allow_unicode=True) if name else ""
    write_text(path / "recipe.yaml", note + recipe.format_yaml())
    (path / "checkpoints").mkdir(exist_ok=True)
    return changed


def refuse_another_recipe(
    path: Path, recipe: Recipe, allowed: Collection[str], data: str | Path = "DATA"
) -> None:
    """Raise `RecipeError` if the folder holds a run whose recipe differs in fields other than the
    `allowed` ones, and `CheckpointError` if that run cannot resume. `data` are the images."""
    refuse_slim(path)
    if holds_run(path):
        changed = difference(load_recipe(path / "recipe.yaml"), recipe)
        if changed.keys() - set(allowed):
            raise _make_recipe_error(path, changed, explain_logits(path, changed, data))


def explain_logits(run: Path, changed: Collection[str], data: str | Path) -> str:
    """Return what to do if the number of classes is among the changed fields; otherwise ""."""
    if "logits" not in changed:
        return ""
    return f"For other classes, start a new run from its weights:\n  {suggest_run(run, data)}"


def _make_recipe_error(path: Path, changed: Changed, reason: str) -> RecipeError:
    """Return the error that names every field that differs, and why it cannot change."""
    lines = []
    for name, values in changed.items():
        for place, old, new in list_changes(name, *values):
            there, now = (shorten_text(format_value(value)) for value in (old, new))
            lines.append(f"  {place}: {there} in that run, {now} here")
    advice = f"{reason}\nUse another --out, or that run's recipe.".lstrip()
    return RecipeError(f"{path} holds a run of a different recipe:\n" + "\n".join([*lines, advice]))


def holds_run(path: Path) -> bool:
    """Return whether a folder holds a run that has begun. A folder left by a command that then
    refused to train does not, nor one whose first checkpoint a kill cut off."""
    folder = path / "checkpoints"
    has_begun = (path / "log.jsonl").exists() or not folder.is_dir() or checkpoint.steps(folder)
    return (path / "recipe.yaml").is_file() and bool(has_begun)
