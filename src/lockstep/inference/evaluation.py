"""Evaluate trained weights, or an exported program, on a data set."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.inference.calibrator import Calibrator
from lockstep.inference.engines import ADVICE
from lockstep.inference.evaluation_images import EvaluationImages, find_evaluation_images
from lockstep.inference.evaluation_result import Evaluation
from lockstep.inference.label_matching import Matched, compare_orders, describe_orders
from lockstep.inference.photo_batches import group_photos, load_photos
from lockstep.inference.programs import ExportedProgram
from lockstep.inference.runtimes import NATIVE
from lockstep.inference.runtimes.scores import Pace, compute_scores
from lockstep.inference.session import Session, SessionOptions, open_session
from lockstep.inference.source import ModelSource
from lockstep.models.accuracy_interval import wilson
from lockstep.models.class_metrics import summarise_classes
from lockstep.models.metrics import Scores, measure
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published_accuracies import Comparison, compare_top1
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DivergedError
from lockstep.system.ranks import count_ranks
from lockstep.weights import LOCKSTEP, Weights

if TYPE_CHECKING:
    from lockstep.inference.label_file import LabelFile, Labels


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
    wants_calibration = calibrate or precision_at is not None
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
    results = {}
    if isinstance(export, ExportedProgram):
        for name, part in images.items():
            results[name] = _evaluate_program(export, weights, part, options, file)
    else:
        with open_session(weights, options, exported=export) as session:
            for name, part in images.items():
                results[name] = _evaluate_weights(session, weights, part, options, calibrator, file)
    result = next(iter(results.values()))
    if folders:
        result = average_sets(str(data), results)
    if export is None:
        result.remarks.extend(source.remark_on_program(options.runtime))
    return result


def _evaluate_weights(
    session: Session,
    weights: Weights,
    images: EvaluationImages,
    options: SessionOptions,
    calibrator: Calibrator | None,
    labels: "LabelFile | None",
) -> Evaluation:
    """Return the result of an evaluation by all ranks, with a calibration if there is a
    `calibrator`. `weights` are as they were opened."""
    batch = options.batch
    if calibrator is not None:
        session = calibrator.watch(session)
    recipe = session.weights.recipe
    matched, remarks = images.open_index(session.weights, session.recorder, labels)
    index = matched.index
    if calibrator is not None and recipe.eval_flips:
        remarks.append("calibrated and evaluated without mirror images, as predict computes")
    place = {"rank": session.rank, "ranks": session.ranks}
    total = math.ceil(len(index) / (batch * session.ranks))
    pace = Pace()
    with open_evaluation(index, recipe, options.execution, batch, **place) as batches:
        watched = session.recorder.watch("evaluating", batches, total)
        scores = matched.score(session.evaluate, pace.watch(watched), batch, session.ranks)
    if session.runtime == NATIVE:
        recipe = recipe.evaluation_recipe()
    return Evaluation(
        runtime=session.runtime,
        precision=recipe.precision,
        speed=pace.describe_speed(batch_images=batch, on_gpu=session.on_gpu),
        calibration={} if calibrator is None else calibrator.store(session.recorder.warn),
        **_describe_scores(scores, weights, images, matched, remarks, options.execution),
    )


def _evaluate_program(
    program: ExportedProgram,
    weights: Weights,
    images: EvaluationImages,
    options: SessionOptions,
    labels: "LabelFile | None",
) -> Evaluation:
    """Return the result of a program in its own runtime. It gets whole photos if it takes them."""
    recorder = Recorder(options.listener)
    recipe = weights.recipe
    execution = options.execution
    batch = options.batch
    matched, remarks = images.open_index(weights, recorder, labels)
    index = matched.index
    if program.takes_photos:
        groups = group_photos(index.sizes_for(recipe)[:], batch)
        total = len(groups)
        batches = load_photos(index, recipe, groups, execution.loader_threads)
    else:
        total = math.ceil(len(index) / batch)
        batches = _load_squares(index, recipe, execution, batch)
    pace = Pace()
    with program.load() as runtime:
        watched = pace.watch(recorder.watch("evaluating", batches, total))
        scores = matched.score(partial(compute_scores, runtime), watched, batch)
    return Evaluation(
        runtime=program.runtime,
        precision=program.precision,
        speed=pace.describe_speed(batch_images=batch, on_gpu=False),
        **_describe_scores(scores, weights, images, matched, remarks, options.execution),
    )


def _load_squares(
    index: Index, recipe: Recipe, execution: Execution, batch: int
) -> Iterator[Batch]:
    """Yield the squares of all images."""
    with open_evaluation(index, recipe, execution, batch) as batches:
        yield from batches


def _describe_scores(
    scores: Scores,
    weights: Weights,
    images: EvaluationImages,
    matched: Matched,
    remarks: list[str],
    execution: Execution,
) -> dict[str, Any]:
    """Return the fields of an `Evaluation` that follow from the scores, and add a remark if the
    order of classes is not proven. Raises `DivergedError` if a score is not finite."""
    index = matched.index
    name = images.source.title
    if infinite := scores.describe_nonfinite():
        about_nan = "".join(f" {remark}." for remark in weights.remarks if "NaN" in remark)
        raise DivergedError(
            f"the loss of {weights.source} on {name} is not finite: {infinite}.{about_nan} {ADVICE}"
        )
    names = (weights.recipe.selection, *execution.metrics)
    metrics: dict[str, Any] = {**measure(scores, len(index.classes), names)}
    metrics["images"] = len(scores.labels)
    per_class = scores.per_class(len(index.classes))
    low, high = wilson(sum(per_class["top1"]), metrics["images"])
    orders = compare_orders(scores, matched)
    if orders:
        remarks.append(describe_orders(orders, metrics["images"]))
    return {
        "source": str(weights.source),
        "data": name,
        "remarks": remarks,
        "metrics": metrics,
        "published": None if matched.answers else _compare_published(weights, metrics, index),
        "quarantined": index.describe_quarantine(),
        "classes": index.classes,
        "class_orders": orders,
        "interval": (100 * low, 100 * high),
        "per_class": per_class,
        "class_summary": summarise_classes(per_class),
    }


def _compare_published(
    weights: Weights, metrics: dict[str, Any], index: Index
) -> Comparison | None:
    """Return a top-1 next to the published ones of the weights' recipe. Other programs' files do
    not say their precision."""
    return compare_top1(
        weights.recipe,
        top1_percent=metrics["top1_percent"],
        images=metrics["images"],
        classes=len(index.classes),
        precision=weights.recipe.precision if weights.origin == LOCKSTEP else None,
        epochs=weights.epochs,
    )
