"""Which runs of a page have the same images."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from lockstep.data.images import printable
from lockstep.data.split import UNREAD
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.runs.image_results import list_validation_images
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
    largest = max(groups, key=lambda group: runs[group[0]].evaluations[-1]["images"])
    data = runs[largest[0]].environment.get("data", "")
    # Runs with one share hold out the same images. A run with another share may have been trained
    # on them, and images of classes that a run does not know are left out.
    divisions = {(str(run.recipe.division), *sorted(run.classes)) for run in runs}
    shared = "DATA"
    if data and len(divisions) == 1 and not runs[0].recipe.folds:
        shared = shlex.quote(printable(data))
    commands = []
    descriptions = []
    for group in groups:
        images = format_count(runs[group[0]].evaluations[-1]["images"], "image")
        descriptions.append(f"{name_group(runs, group)}: {images}")
        for number in group:
            run = shlex.quote(printable(str(runs[number].folder)))
            commands.append(f"lockstep evaluate {run} --data {shared}")
    return "; ".join(descriptions), commands


def compare_common_images(runs: Sequence[Run]) -> list[str]:
    """Return lines on runs that were evaluated on different images: the accuracies of their best
    checkpoints on the images that all were evaluated on, and the classes that not all know."""
    if len(group_runs(runs, "val")) < 2:
        return []
    lines = []
    shared = set(runs[0].classes).intersection(*[run.classes for run in runs])
    for run in runs:
        own = sorted(set(run.classes) - shared)
        if own and shared:
            lines.append(f"{run.name} knows classes that not all runs know: {list_first(own)}.")
    images = [list_validation_images(run.folder) for run in runs]
    common = set(images[0]).intersection(*images)
    accuracies = []
    for run, numbers in zip(runs, images, strict=True):
        ranks = _rank_images(run)
        if run.recipe.folds or not common or len(ranks) <= max(numbers.values()):
            return lines
        hits = int((ranks[[numbers[image] for image in common]] == 0).sum())
        accuracy = format_accuracy(100 * hits / len(common), len(common))
        accuracies.append(f"{run.name} {accuracy}")
    count = format_count(len(common), "image")
    return [f"Top-1 on the {count} that all were evaluated on: {', '.join(accuracies)}.", *lines]


def _rank_images(run: Run) -> np.ndarray:
    """Return the rank of the right class for the validation images, by the best weights of a run;
    empty if the run did not keep it."""
    best = run.best
    results = None
    if best is not None:
        results = run.find_results(best["step"], best["weights"])
    if best is None or results is None:
        return np.zeros(0, np.int32)
    return results.scores[best["weights"]].ranks


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
