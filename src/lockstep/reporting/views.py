"""Show what an evaluation says about classes and images: one view for each run and its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.data.index import Index
from lockstep.data.listing import printable
from lockstep.models.metrics import ClassCounts, Scores, is_top5_informative, wilson
from lockstep.recipes.recipe import own_geometry
from lockstep.reporting import image_statistics
from lockstep.reporting.images import ImagesGone, encoded_images, explained_images, open_images
from lockstep.runs.reading import Run

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
    taken_for: str = ""
    """The class its images were wrongly taken for most often, and how often; empty if none or
    unknown."""

    @property
    def accuracy(self) -> float:
        """The share of top-1 hits; 0 without images."""
        return self.top1 / self.images if self.images else 0.0


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
    classes: list[ClassRow]
    matrix: Matrix | None = None
    """None if there are no results of single images. Then the fields below are empty too."""
    pairs: list[tuple[str, str, int, float]] = field(default_factory=list)
    """The most frequent mistakes: class, taken for, images, share of the class."""
    bins: list[image_statistics.Bin] = field(default_factory=list)
    calibration_error: float | None = None
    mistakes: list[Mistake] = field(default_factory=list)
    note: str = ""
    """Why something is missing."""

    @property
    def worst(self) -> list[ClassRow]:
        """The classes with the lowest top-1, the lowest first; those without images are left out."""
        known = [row for row in self.classes if row.images]
        return sorted(known, key=lambda row: row.accuracy)[:WORST_CLASSES]


def views(runs: Sequence[Run]) -> list[View]:
    """Return the views of all finished runs, without the names and images of mistakes."""
    found: list[View] = []
    for number, run in enumerate(runs):
        if run.results is not None:
            found += [
                _view(run, number, weights, scores)
                for weights, scores in run.results.scores.items()
            ]
        elif run.report is not None:
            note = (
                "The run has no results of single images (validation.npz): its version of Lockstep"
                " did not write them."
            )
            counts = run.report["per_class"].items()
            found += [
                View(number, weights, _rows(run, of_weights), note=note)
                for weights, of_weights in counts
            ]
    return found


def with_images(
    runs: Sequence[Run], found: Sequence[View], *, explain: bool = False
) -> tuple[list[View], dict[str, str]]:
    """Return the views with the names of mistaken images, and these images as `data:` addresses by
    `image_key`.

    With `explain`, there is also an explanation of each
    (`lockstep.reporting.images.explained_images`). If images cannot be read, the note of the view
    says why.
    """
    images: dict[str, str] = {}
    placed: list[View] = []
    for number, run in enumerate(runs):
        own = [view for view in found if view.run == number]
        try:
            own, addresses = _with_images(run, own, explain=explain)
            images |= addresses
        except ImagesGone as gone:
            own = [replace(view, note=str(gone)) for view in own]
        placed += own
    return placed, images


def image_key(run: Run, sample: int) -> str:
    """Return the name of an image on the page. Runs share it if they saw the same images with the
    same crop and resize."""
    assert run.results is not None
    recipe = run.recipe
    how = f"{recipe.eval_resize}.{recipe.eval_crop}.{recipe.eval_antialias:d}{recipe.dct_scaling:d}"
    how += ".turned" if recipe.exif_orientation else ""
    how += "" if recipe.interpolation == "bilinear" else f".{recipe.interpolation}"
    how += "".join(f".{name}.{value}" for name, value in own_geometry(recipe).items())
    return f"{run.results.digest[:12]}.{how}.{sample}"


def _rows(run: Run, counts: ClassCounts, taken_for: Sequence[str] | None = None) -> list[ClassRow]:
    columns = (
        run.classes,
        counts["images"],
        counts["top1"],
        counts["top5"],
        taken_for or [""] * len(run.classes),
    )
    return [
        ClassRow(name, images, top1, top5, *wilson(top1, images), other)
        for name, images, top1, top5, other in zip(*columns, strict=True)
    ]


def _view(run: Run, number: int, weights: str, scores: Scores) -> View:
    # A model may have more logits than the data has classes, and predict one of the extra ones.
    known = len(run.classes)
    count = max(known, int(scores.predictions.max(initial=0)) + 1)
    names = [*run.classes, *(f"no class ({i})" for i in range(known, count))]
    matrix = image_statistics.confusion(scores.labels, scores.predictions, count)
    images = matrix.sum(axis=1)
    others, times = image_statistics.most_taken_for(matrix)
    taken_for = [
        f"{names[i]} ({n})" if n else ""
        for i, n in zip(others.tolist(), times.tolist(), strict=True)
    ]
    right = scores.ranks < 1
    bins = image_statistics.reliability(scores.confidences, right)
    return View(
        run=number,
        weights=weights,
        classes=_rows(run, scores.per_class(known), taken_for[:known]),
        matrix=_matrix(matrix, names),
        pairs=[
            (names[row], names[column], times, times / int(images[row]))
            for row, column, times in image_statistics.confused_pairs(matrix, MOST_PAIRS)
        ],
        bins=bins,
        calibration_error=image_statistics.expected_calibration_error(bins),
        mistakes=[
            Mistake(
                sample=sample,
                place="",
                label=names[scores.labels[sample]],
                prediction=names[scores.predictions[sample]],
                confidence=float(scores.confidences[sample]),
                rank=int(scores.ranks[sample]),
            )
            for sample in image_statistics.most_confident_mistakes(
                scores.confidences, right, MOST_MISTAKES
            )
        ],
    )


def _matrix(matrix: np.ndarray, names: list[str]) -> Matrix:
    cells, size = image_statistics.grouped(matrix, MOST_CELLS)
    right, _ = image_statistics.grouped(np.diag(np.diag(matrix)), MOST_CELLS)
    groups = [names[first : first + size] for first in range(0, len(names), size)]
    return Matrix(
        names=[group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}" for group in groups],
        group_classes=size,
        images=cells.sum(axis=1).tolist(),
        cells=cells.tolist(),
        wrong_inside=(np.diag(cells) - np.diag(right)).tolist(),
    )


def _with_images(run: Run, own: list[View], *, explain: bool) -> tuple[list[View], dict[str, str]]:
    """Return the views with the names of their mistakes, and the mistaken images as `data:`
    addresses by key."""
    samples = sorted({mistake.sample for view in own for mistake in view.mistakes})
    if not samples:
        return own, {}
    index = open_images(run)
    encoded = encoded_images(run, index, samples)
    placed = [
        replace(view, mistakes=[_placed(mistake, index) for mistake in view.mistakes])
        for view in own
    ]
    images = {image_key(run, sample): address for sample, address in encoded.items()}
    for number, view in enumerate(placed if explain else []):
        explained = explained_images(
            run, view.weights, index, [mistake.sample for mistake in view.mistakes]
        )
        keys = {
            sample: f"{image_key(run, sample)}.{view.run}.{view.weights}" for sample in explained
        }
        images |= {keys[sample]: address for sample, address in explained.items()}
        mistakes = [replace(mistake, explanation=keys[mistake.sample]) for mistake in view.mistakes]
        placed[number] = replace(view, mistakes=mistakes)
    return placed, images


def _placed(mistake: Mistake, index: Index) -> Mistake:
    name = index.name(mistake.sample) or index.place(mistake.sample)
    return replace(mistake, place=printable(name))


def as_data(view: View) -> dict[str, Any]:
    """Return the part of a view that the page's script draws, as plain values."""
    return {
        "run": view.run,
        "weights": view.weights,
        "top5": is_top5_informative(len(view.classes)),
        "classes": [
            [
                row.name,
                row.images,
                row.top1,
                row.top5,
                round(row.low, 6),
                round(row.high, 6),
                row.taken_for,
            ]
            for row in view.classes
        ],
        "matrix": vars(view.matrix) if view.matrix else None,
        "bins": [vars(each) for each in view.bins],
    }
