"""Which runs of a page have the same images, and what makes others comparable."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from lockstep.data.images import printable
from lockstep.data.split import UNREAD
from lockstep.runs.reading import Run
from lockstep.system.errors import CheckpointError
from lockstep.system.text import format_count, list_first
from lockstep.weights import checkpoint

Part = Literal["train", "val"]
_FOLDS = "folds of "


@dataclass(frozen=True)
class OtherImages:
    """That runs were evaluated on different validation images."""

    groups: list[str]
    """The names of the runs with the same images, and how many these are."""
    commands: list[str]
    """Evaluate all runs on one set."""


def group_runs(runs: Sequence[Run], part: Part) -> list[list[int]]:
    """Return the numbers of the runs that were trained ("train") or evaluated ("val"), in groups
    that have the same images. The runs of a cross-validation are one group.

    Images are the same if their digests are. Where one is unknown, the data set and the number of
    images count.
    """
    groups: list[list[int]] = []
    digests = [_find_digest(run, part) for run in runs]
    names = [_name_images(run, part) for run in runs]
    for number, run in enumerate(runs):
        if not (run.training if part == "train" else run.evaluations):
            continue
        for group in groups:
            first = group[0]
            keys = digests if digests[first] and digests[number] else names
            if keys[first] == keys[number]:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def name_group(runs: Sequence[Run], group: Sequence[int]) -> str:
    """Return the names of some runs."""
    return list_first([runs[number].name for number in group], 3)


def compare_images(runs: Sequence[Run]) -> OtherImages | None:
    """Return which runs were evaluated on different images; None if all have the same."""
    groups = group_runs(runs, "val")
    if len(groups) < 2:
        return None
    first = runs[groups[0][0]]
    data = first.environment.get("data", "")
    # A share is not that of another run, which was perhaps trained on it.
    shared = "DATA" if first.recipe.division or not data else shlex.quote(printable(data))
    commands = []
    descriptions = []
    for group in groups:
        images = format_count(runs[group[0]].evaluations[-1]["images"], "image")
        descriptions.append(f"{name_group(runs, group)}: {images}")
        for number in group:
            run = shlex.quote(printable(str(runs[number].folder)))
            commands.append(f"lockstep evaluate {run} --data {shared}")
    return OtherImages(descriptions, commands)


def _find_digest(run: Run, part: Part) -> str:
    """Return the digest of a run's images; "" if it is unknown."""
    if run.recipe.folds:
        return f"{_FOLDS}{run.folder.resolve().parent}"
    if part == "val" and run.results is not None:
        return run.results.digest
    folder = run.folder / "checkpoints"
    for step in reversed(checkpoint.steps(folder)):
        with suppress(CheckpointError):
            digests = checkpoint.read_data_digest(checkpoint.checkpoint_path(folder, step))
            training, _, validation = digests.partition(" ")
            return training if part == "train" else validation.replace(UNREAD, "")
    return ""


def _name_images(run: Run, part: Part) -> tuple[str, int | None]:
    about = run.environment.get(part, {})
    return str(run.environment.get("data")), about.get("images")
