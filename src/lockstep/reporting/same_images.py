"""Which runs of a page have the same images."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from lockstep.data.images import printable
from lockstep.data.split import UNREAD
from lockstep.runs.reading import Run
from lockstep.system.errors import CheckpointError
from lockstep.system.text import format_count, list_first
from lockstep.weights import checkpoint

Part = Literal["train", "val"]


def group_runs(runs: Sequence[Run], part: Part) -> list[list[int]]:
    """Return the numbers of the runs that were trained ("train") or evaluated ("val"), in groups
    that have the same images. The runs of a cross-validation are one group.

    Images are the same if their digests are. Where one is unknown, the data set and the number of
    images count.
    """
    groups: list[list[int]] = []
    keys = [_identify_images(run, part) for run in runs]
    for number, run in enumerate(runs):
        if not (run.training if part == "train" else run.evaluations):
            continue
        for group in groups:
            ours = keys[number]
            theirs = keys[group[0]]
            if ours[0] == theirs[0] if ours[0] and theirs[0] else ours[1:] == theirs[1:]:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def name_group(runs: Sequence[Run], group: Sequence[int]) -> str:
    """Return the names of some runs."""
    return list_first([runs[number].name for number in group], 3)


def describe_other_images(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Return which runs were evaluated on which number of images, and commands that evaluate all on
    one set; nothing if all have the same images."""
    groups = group_runs(runs, "val")
    if len(groups) < 2:
        return "", []
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
    return "; ".join(descriptions), commands


def _identify_images(run: Run, part: Part) -> tuple[Any, ...]:
    """Return the digest of a run's images, "" if it is unknown, their data set and their number."""
    digest = ""
    folder = run.folder / "checkpoints"
    if run.recipe.folds:
        digest = f"folds of {run.folder.resolve().parent}"
    elif part == "val" and run.results is not None:
        digest = run.results.digest
    elif saved := checkpoint.steps(folder):
        with suppress(CheckpointError):
            digests = checkpoint.read_data_digest(checkpoint.checkpoint_path(folder, saved[-1]))
            training, _, validation = digests.partition(" ")
            digest = training if part == "train" else validation.replace(UNREAD, "")
    return digest, run.environment.get("data"), run.environment.get(part, {}).get("images")
