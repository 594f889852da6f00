"""Show what an evaluation says about classes and images: one view for each run and its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.data.images import printable
from lockstep.models.accuracy_interval import wilson
from lockstep.models.class_metrics import FEW_IMAGES, ClassCounts
from lockstep.models.metrics import METRICS, Scores
from lockstep.recipes.recipe import own_geometry
from lockstep.reporting.images import (
    ImagesGone,
    encode_images,
    explain_images,
    name_images,
    open_images,
)
from lockstep.runs.calibrated_results import calibrate_scores
from lockstep.runs.image_results import Results
from lockstep.runs.reading import Run
from lockstep.weights.calibration import Bin, bin_confidences, compute_calibration_error
from lockstep.weights.checkpoint import checkpoint_path

MOST_CELLS = 50
"""A confusion matrix has at most this many rows; more classes are added up in groups of neighbours.
"""
MOST_PAIRS = 30
MOST_MISTAKES = 24
WORST_CLASSES = 10


@dataclass(frozen=True)
class ClassRow:
    """The results of one class."""

    name: str
    images: int
    top1: int
    top5: int
    low: float
    high: float
    """Wilson's 95 % interval of top-1, within 0 to 1."""
    predicted: int | None = None
    """Images of any class that were taken for this one; None in older reports."""
    taken_for: str = ""
    """The class that its images were most often mistaken for, and how often; empty if none or
    unknown."""

    @property
    def accuracy(self) -> float:
        """The share of top-1 hits; 0 without images."""
        return self.top1 / max(self.images, 1)


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix. If there are many classes, neighbours are added up to groups."""

    names: list[str]
    """Names of the groups."""
    group_classes: int
    """Number of classes in a group."""
    images: list[int]
    """Images of every group."""
    cells: list[list[int]]
    """Images of a group (row) that were taken for one of a group (column)."""
    wrong_inside: list[int]
    """Images in each diagonal cell that were taken for another class of the same group."""


@dataclass(frozen=True)
class Mistake:
    """An image that the model was wrong about."""

    sample: int
    place: str
    """The name of the image in its data set; empty if the data set is gone."""
    label: str
    prediction: str
    confidence: float
    rank: int
    """Number of classes that the model preferred to the right one."""
    explanation: str = ""
    """The name of its explanation on the page; empty without one."""


@dataclass(frozen=True)
class View:
    """An evaluation of some weights of a run."""

    run: int
    weights: str
    step: int
    is_best: bool
    """Whether it is the evaluation of the best checkpoint."""
    classes: list[ClassRow]
    matrix: Matrix | None = None
    """None if there are no results of single images. Then the fields below are empty too."""
    pairs: list[tuple[str, str, int, float]] = field(default_factory=list)
    """The most frequent mistakes: class, taken for, images, share of the class."""
    bins: list[Bin] = field(default_factory=list)
    calibration_error: float | None = None
    basis: str = ""
    """Which temperature the confidences belong to."""
    mistakes: list[Mistake] = field(default_factory=list)
    note: str = ""
    """Why something is missing."""

    @property
    def worst(self) -> list[ClassRow]:
        """The classes with images of the lowest top-1, the lowest first."""
        known = [row for row in self.classes if row.images]
        return sorted(known, key=lambda row: row.accuracy)[:WORST_CLASSES]


def build_views(runs: Sequence[Run]) -> list[View]:
    """Return the views of all evaluated runs, without the names and images of mistakes. The best
    evaluation of a run is its first view."""
    views = []
    for number, run in enumerate(runs):
        own = []
        for results in filter(None, (run.best_results, run.results)):
            own += [_build_view(run, number, results, weights) for weights in results.scores]
        if run.results is None and run.report is not None:
            for weights, counts in run.report["per_class"].items():
                step = run.report["steps"]
                is_best = run.is_best(step, weights)
                rows = _count_classes(run, counts, [""] * len(run.classes))
                own.append(View(number, weights, step, is_best, rows, note=_WITHOUT_RESULTS))
        if own and run.best is not None and not any(view.is_best for view in own):
            own = [replace(view, note=view.note or _explain_missing(run, view)) for view in own]
        views += sorted(own, key=lambda view: not view.is_best)
    return views


def _explain_missing(run: Run, view: View) -> str:
    assert run.best is not None
    return (
        f"Classes, confusion and mistakes are those of step {view.step}: the run kept no results of"
        f" single images for its best checkpoint, step {run.best['step']}."
    )


_WITHOUT_RESULTS = (
    "The run kept no results of single images (validation.npz): an older Lockstep wrote it."
)


def add_images(
    runs: Sequence[Run], views: Sequence[View], *, explain: bool = False
) -> tuple[list[View], dict[str, str]]:
    """Return the views with the names of misclassified images, and these as `data:` addresses by
    `image_key`.

    With `explain`, there is also an explanation of each
    (`lockstep.reporting.images.explain_images`). If images cannot be read, the note of the view
    says why.
    """
    images: dict[str, str] = {}
    complete: list[View] = []
    for number, run in enumerate(runs):
        own = [view for view in views if view.run == number]
        try:
            own, addresses = _add_images(run, own, explain=explain)
            images |= addresses
        except ImagesGone as gone:
            own = [_name_mistakes(run, replace(view, note=str(gone))) for view in own]
        complete += own
    return complete, images


def _name_mistakes(run: Run, view: View) -> View:
    """Return a view with the names that the run listed, for images that are gone."""
    names = name_images(run, [mistake.sample for mistake in view.mistakes])
    named = [replace(mistake, place=names.get(mistake.sample, "")) for mistake in view.mistakes]
    return replace(view, mistakes=named)


def image_key(run: Run, sample: int) -> str:
    """Return the name of an image on the page. Runs share it if they saw the same images with the
    same crop and resize."""
    assert run.results is not None
    recipe = run.recipe
    how = f"{recipe.eval_resize}.{recipe.eval_crop}.{recipe.eval_antialias:d}{recipe.dct_scaling:d}"
    if recipe.exif_orientation:
        how += ".turned"
    if recipe.interpolation != "bilinear":
        how += f".{recipe.interpolation}"
    for name, value in own_geometry(recipe).items():
        how += f".{name}.{value}"
    return f"{run.results.digest[:12]}.{how}.{sample}"


def _count_classes(run: Run, counts: ClassCounts, taken_for: Sequence[str]) -> list[ClassRow]:
    predicted: Sequence[int | None] = counts.get("predicted", [None] * len(run.classes))
    columns = (run.classes, counts["images"], counts["top1"], counts["top5"], predicted, taken_for)
    rows = []
    for name, images, top1, top5, guesses, other in zip(*columns, strict=True):
        rows.append(ClassRow(name, images, top1, top5, *wilson(top1, images), guesses, other))
    return rows


def _build_view(run: Run, number: int, results: Results, weights: str) -> View:
    scores, basis = calibrate_scores(run, results, weights)
    classes = run.classes
    name = partial(_name_class, classes)
    counts = scores.per_class(len(classes))
    confusions = count_confusions(scores.labels, scores.predictions)
    mistakes = find_mistakes(confusions)
    _, first = np.unique(mistakes[:, 0], return_index=True)
    taken_for = [""] * len(classes)
    for row, column, times in mistakes[first].tolist():
        taken_for[row] = f"{name(column)} ({times})"
    pairs = []
    for row, column, times in mistakes[:MOST_PAIRS].tolist():
        pairs.append((name(row), name(column), times, times / counts["images"][row]))
    bins = bin_confidences(scores.confidences, scores.ranks < 1)
    return View(
        run=number,
        weights=weights,
        step=results.step,
        is_best=run.is_best(results.step, weights),
        classes=_count_classes(run, counts, taken_for),
        matrix=_build_matrix(confusions, classes),
        pairs=pairs,
        bins=bins,
        calibration_error=compute_calibration_error(bins),
        basis=basis,
        mistakes=_list_mistakes(scores, classes),
    )


def _name_class(classes: list[str], number: int) -> str:
    """Return the name of a class. A model may have more logits than the data has classes, and
    predict one of the extra ones."""
    return classes[number] if number < len(classes) else f"no class ({number})"


def _list_mistakes(scores: Scores, classes: list[str]) -> list[Mistake]:
    samples = find_confident_mistakes(scores.confidences, scores.ranks < 1, MOST_MISTAKES)
    return [
        Mistake(
            sample=sample,
            place="",
            label=classes[scores.labels[sample]],
            prediction=_name_class(classes, scores.predictions[sample]),
            confidence=float(scores.confidences[sample]),
            rank=int(scores.ranks[sample]),
        )
        for sample in samples
    ]


def _build_matrix(confusions: np.ndarray, classes: list[str]) -> Matrix:
    count = max(len(classes), int(confusions[:, 1].max(initial=0)) + 1)
    size = -(-count // MOST_CELLS)
    groups = []
    for first in range(0, count, size):
        names = [_name_class(classes, first), _name_class(classes, min(first + size, count) - 1)]
        groups.append(" … ".join(dict.fromkeys(names)))
    cells = group_classes(confusions, size, len(groups))
    return Matrix(
        names=groups,
        group_classes=size,
        images=cells.sum(axis=1).tolist(),
        cells=cells.tolist(),
        wrong_inside=np.diag(group_classes(find_mistakes(confusions), size, len(groups))).tolist(),
    )


def _add_images(run: Run, views: list[View], *, explain: bool) -> tuple[list[View], dict[str, str]]:
    """Return the views with the names of their mistakes, and the misclassified images as `data:`
    addresses by key."""
    samples = sorted({mistake.sample for view in views for mistake in view.mistakes})
    if not samples:
        return views, {}
    index = open_images(run)
    images = {}
    for sample, address in encode_images(run, index, samples).items():
        images[image_key(run, sample)] = address
    complete = []
    for view in views:
        mistakes = []
        for mistake in view.mistakes:
            name = index.name(mistake.sample) or index.place(mistake.sample)
            mistakes.append(replace(mistake, place=printable(name)))
        path = checkpoint_path(run.folder / "checkpoints", view.step)
        if explain and not path.is_dir():
            note = f"{view.note} Not explained: the checkpoint of step {view.step} is gone."
            view = replace(view, note=note.strip())
        elif explain:
            wrong = [mistake.sample for mistake in mistakes]
            results = run.find_results(view.step, view.weights)
            assert results is not None
            pictures = explain_images(run, results, view.weights, index, wrong)
            for number, mistake in enumerate(mistakes):
                key = f"{image_key(run, mistake.sample)}.{view.run}.{view.weights}.{view.step}"
                images[key] = pictures[mistake.sample]
                mistakes[number] = replace(mistake, explanation=key)
        complete.append(replace(view, mistakes=mistakes))
    return complete, images


def select_data(view: View) -> dict[str, Any]:
    """Return the part of a view that the page's script draws, as plain values."""
    classes = []
    for row in view.classes:
        counts = (row.images, row.top1, row.top5, row.predicted)
        classes.append([row.name, *counts, round(row.low, 6), round(row.high, 6), row.taken_for])
    return {
        "run": view.run,
        "weights": view.weights,
        "top5": METRICS["top5"].is_informative(len(view.classes)),
        "classes": classes,
        "few": FEW_IMAGES,
        "matrix": vars(view.matrix) if view.matrix else None,
        "bins": list(map(vars, view.bins)),
    }


def count_confusions(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return how many images of each class were taken for each class: rows of (class, taken for,
    images) in order, int64 [pairs, 3]. Pairs without images have no row."""
    keys, images = np.unique((labels.astype(np.int64) << 32) | predictions, return_counts=True)
    return np.column_stack([keys >> 32, keys & (2**32 - 1), images])


def group_classes(pairs: np.ndarray, size: int, groups: int) -> np.ndarray:
    """Return the images of pairs of classes, with `size` neighbouring classes added up to each
    group: int64 [groups, groups]."""
    cells = np.zeros((groups, groups), np.int64)
    np.add.at(cells, (pairs[:, 0] // size, pairs[:, 1] // size), pairs[:, 2])
    return cells


def find_mistakes(pairs: np.ndarray) -> np.ndarray:
    """Return the pairs of two different classes, the most frequent first."""
    mistakes = pairs[pairs[:, 0] != pairs[:, 1]]
    return mistakes[np.argsort(-mistakes[:, 2], kind="stable")]


def find_confident_mistakes(confidences: np.ndarray, right: np.ndarray, count: int) -> list[int]:
    """Return at most `count` wrong images, the most confident first. Images of equal confidence
    keep their order."""
    wrong = np.flatnonzero(~right & np.isfinite(confidences))
    return wrong[np.argsort(-confidences[wrong], kind="stable")][:count].tolist()
