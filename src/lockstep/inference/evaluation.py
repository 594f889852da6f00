"""Evaluate trained weights, or an exported program, on a data set."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.inference.calibrator import Calibrator
from lockstep.inference.engines import ADVICE
from lockstep.inference.evaluation_images import EvaluationImages, find_evaluation_images
from lockstep.inference.evaluation_result import Evaluation
from lockstep.inference.images import read_photo
from lockstep.inference.label_matching import Matched, compare_orders, describe_orders
from lockstep.inference.programs import ExportedProgram
from lockstep.inference.runtimes import NATIVE
from lockstep.inference.runtimes.scores import Pace
from lockstep.inference.session import Session, SessionOptions, open_session
from lockstep.inference.source import ModelSource
from lockstep.models.accuracy_interval import wilson
from lockstep.models.class_metrics import summarise_classes
from lockstep.models.metrics import Scores, measure
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published_accuracies import compare_top1
from lockstep.runs.image_results import find_trained
from lockstep.system.errors import DivergedError, UserError, as_path
from lockstep.system.machine import share_of_cores
from lockstep.system.ranks import count_ranks
from lockstep.weights import LOCKSTEP, Weights

if TYPE_CHECKING:
    from lockstep.inference.label_file import LabelFile, Labels

_MOST_PIXELS = 2**24
"""The photos of a batch have at most this many pixels of three bytes, unless one alone has more."""


def evaluate(
    source: ModelSource,
    data: str | Path | None,
    options: SessionOptions,
    labels: "Labels | None" = None,
    *,
    split: float | None = None,
    calibrate: bool = False,
    precision_at: float | None = None,
) -> Evaluation:
    """Return what `Model.evaluate` returns."""
    if data is not None:
        as_path(data, "data")
    wants_calibration = calibrate or precision_at is not None
    if wants_calibration and source.is_copy:
        raise UserError("a calibration changes what is signed; calibrate first, then sign")
    file = None
    if labels is not None:
        from lockstep.inference.label_file import read_labels

        file = read_labels(labels, calibrates=wants_calibration)
    export = source.find_export(options)
    if isinstance(export, ExportedProgram):
        export.check_options(options.precision, ranks=count_ranks())
    weights = source.choose_weights(export)
    calibrator = Calibrator(weights, precision_at) if wants_calibration else None
    folders: dict[str, Path] = {}
    if data is not None and not wants_calibration:
        from lockstep.inference.evaluation_sets import average_sets, find_sets

        folders = find_sets(data, weights, has_labels=file is not None)
    images = {}
    for name, folder in folders.items() or [("", data)]:
        images[name] = find_evaluation_images(folder, weights.recipe, split, run=source.path)
    if isinstance(export, ExportedProgram):
        opening = export.open_session(weights, options.listener)
    else:
        opening = open_session(weights, options, exported=export)
    results = {}
    with opening as session:
        for name, part in images.items():
            results[name] = _evaluate(session, weights, part, options, calibrator, file)
    result = next(iter(results.values()))
    if folders:
        result = average_sets(str(data), results)
    if export is None:
        result.remarks.extend(source.remark_on_program(options.runtime))
    return replace(result, source=source.replace_path(result.source))


def _evaluate(
    session: Session,
    weights: Weights,
    images: EvaluationImages,
    options: SessionOptions,
    calibrator: Calibrator | None,
    labels: "LabelFile | None",
) -> Evaluation:
    """Return the result of an evaluation by all ranks, with a calibration if there is a
    `calibrator`. `weights` are as they were opened. Raises `DivergedError` if a score is not
    finite."""
    recipe = session.weights.recipe
    if calibrator is not None:
        session = calibrator.watch(session)
    matched, remarks = images.open_index(session.weights, session.recorder, labels)
    name = images.source.title
    trained = int(find_trained(weights.checkpoint_file, matched.index).sum())
    if trained:
        remarks.insert(
            0,
            f"the run, or the weights that it started from, was trained on {trained:,} of these"
            f" {len(matched.index):,} images (the bytes are the same), so the results are too"
            " optimistic: evaluate images that were not used for training",
        )
    if calibrator is not None and recipe.eval_flips:
        remarks.append("calibrated and evaluated without mirrored images, as in `lockstep predict`")
    pace = Pace()
    with _open_batches(matched.index, session, options) as (batches, total):
        watched = pace.watch(session.recorder.watch("evaluating", batches, total))
        if matched.answers is None:
            scores = session.evaluate(watched)
        else:
            scores = matched.answers.evaluate(session, watched, options.batch)
    if infinite := scores.describe_nonfinite():
        about_nan = "".join(f" {remark}." for remark in weights.remarks if "NaN" in remark)
        raise DivergedError(
            f"the loss of {weights.source} on {name} is not finite: {infinite}.{about_nan} {ADVICE}"
        )
    if session.runtime == NATIVE:
        recipe = recipe.evaluation_recipe()
    return Evaluation(
        source=str(weights.source),
        data=name,
        runtime=session.runtime,
        precision=session.precision or recipe.precision,
        speed=pace.describe_speed(batch_images=options.batch, on_gpu=session.on_gpu),
        calibration={} if calibrator is None else calibrator.store(session.recorder.warn),
        quarantined=matched.index.describe_quarantine(),
        trained_images=trained,
        **_describe_scores(scores, weights, matched, remarks, options.execution),
    )


@contextmanager
def _open_batches(
    index: Index, session: Session, options: SessionOptions
) -> Iterator[tuple[Iterator[Batch], int]]:
    """Yield this rank's batches, and their number."""
    recipe = session.weights.recipe
    execution = options.execution
    if session.takes_photos:
        groups = group_photos(index.sizes_for(recipe)[:], options.batch)
        yield load_photos(index, recipe, groups, execution.loader_threads), len(groups)
        return
    total = math.ceil(len(index) / (options.batch * session.ranks))
    place = {"rank": session.rank, "ranks": session.ranks}
    with open_evaluation(index, recipe, execution, options.batch, **place) as batches:
        yield batches, total


def _describe_scores(
    scores: Scores,
    weights: Weights,
    matched: Matched,
    remarks: list[str],
    execution: Execution,
) -> dict[str, Any]:
    """Return the fields of an `Evaluation` that follow from the scores, and the remarks; one more
    if the class order is uncertain."""
    classes = len(matched.index.classes)
    names = (weights.recipe.selection, *execution.metrics)
    metrics: dict[str, Any] = {**measure(scores, classes, names)}
    images = metrics["images"] = len(scores.labels)
    per_class = scores.per_class(classes)
    low, high = wilson(sum(per_class["top1"]), images)
    orders = compare_orders(scores, matched)
    if orders:
        remarks.append(describe_orders(orders, images))
    published = None
    if matched.answers is None:
        published = compare_top1(
            weights.recipe,
            top1_percent=metrics["top1_percent"],
            images=images,
            classes=classes,
            # Other programs' files do not say their precision.
            precision=weights.recipe.precision if weights.origin == LOCKSTEP else None,
            epochs=weights.epochs,
        )
    return {
        "remarks": remarks,
        "metrics": metrics,
        "published": published,
        "classes": matched.index.classes,
        "class_orders": orders,
        "interval": (100 * low, 100 * high),
        "per_class": per_class,
        "class_summary": summarise_classes(per_class),
    }


def group_photos(sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the positions of consecutive photos of one size, in groups of at most `most` photos
    and `_MOST_PIXELS`.

    `sizes` are heights and widths: int64 [N, 2].

    >>> group_photos(np.array([[4, 3], [4, 3], [4, 3], [5, 3]]), 2)
    [array([0, 1]), array([2]), array([3])]
    """
    changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
    groups = []
    for run in np.split(np.arange(len(sizes)), changes):
        count = max(1, min(most, _MOST_PIXELS // int(sizes[run[0]].prod()))) if len(run) else 1
        groups += [run[start : start + count] for start in range(0, len(run), count)]
    return groups


def load_photos(
    index: Index, recipe: Recipe, groups: list[np.ndarray], threads: int = 0
) -> Iterator[Batch]:
    """Yield batches of whole photos, turned as the recipe says. Raises `DataError` that names the
    file.

    As many threads as there are cores decode ahead, unless `threads` is a number of them.
    """

    def read(sample: int) -> np.ndarray:
        try:
            return read_photo(index.read(sample), recipe)
        except ValueError as error:
            raise index.explain_change(sample, str(error)) from None

    threads = threads or share_of_cores()
    samples = iter(np.concatenate(groups).tolist() if groups else [])
    with ThreadPoolExecutor(threads, thread_name_prefix="lockstep-photos") as pool:
        started = deque(pool.submit(read, sample) for sample in islice(samples, 2 * threads))
        try:
            for group in groups:
                photos = []
                for _ in group:
                    photos.append(started.popleft().result())
                    started.extend(pool.submit(read, sample) for sample in islice(samples, 1))
                yield Batch(np.stack(photos), index.labels(group))
        finally:
            for task in started:
                task.cancel()
