"""Evaluate trained weights, or an exported program, on a data set."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.inference.calibrating import Calibrator
from lockstep.inference.computation import Computation, open_computation
from lockstep.inference.evaluation_images import (
    EvaluationImages,
    find_evaluation_images,
)
from lockstep.inference.label_matching import Matched, compare_orders, describe_orders
from lockstep.inference.loaded_engine import ADVICE
from lockstep.inference.photo_batches import group_photos, load_photos
from lockstep.inference.programs import ExportedProgram, remark_on_weights
from lockstep.inference.runtimes import AUTO, NATIVE
from lockstep.inference.runtimes.scoring import Pace, compute_scores
from lockstep.inference.selection import find_export, open_source
from lockstep.models.accuracy_interval import wilson
from lockstep.models.class_metrics import summarise_classes
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published_accuracies import Comparison, compare_top1
from lockstep.runs.divergence import describe_nonfinite
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DivergedError
from lockstep.system.event_log import Summary
from lockstep.system.ranks import count_ranks
from lockstep.weights import LOCKSTEP, AnySource, Classes, Preprocessing, Weights, choose


def evaluate(
    source: AnySource,
    data: str | Path | None = None,
    *,
    checkpoint: str | None = None,
    ema: bool | None = None,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
    split: float | None = None,
    batch: int = 32,
    calibrate: bool = False,
    precision_at: float | None = None,
    runtime: str | None = None,
    execution: Execution | None = None,
    preprocessing: Preprocessing | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Return accuracy, loss and per-class counts on the validation images of `data` (all its images
    if it has none; by default those of the run). Every image counts once.

    - If `data` has no validation images, the share that the weights' run set apart is evaluated.
      `split` is a different share; 0 evaluates all images.
    - `runtime` is "native" (the execution's backend; the default), "auto" (the fastest installed
      one that keeps the bound), another runtime such as "onnxruntime", or "program": an export in
      its own runtime. Exports that can only compute run by default (docs/how-to/runtimes.md).
    - With `calibrate`, a temperature is fitted and stored with the checkpoint. `precision_at`, such
      as 0.99, also chooses the threshold of unknown images (`inference.calibrating`).
    - The other options are those of `lockstep.predict`. With several processes (torchrun), every
      process calls this and gets the result.

    The result has `class_orders`, the accuracy in other orders of folders (`label_matching`),
    `speed`, how fast images were evaluated (`runtimes.scoring.Speed`), and `published`, the top-1
    next to published ones (`recipes.published_accuracies.Comparison`), or None. Raises
    `DivergedError` if a loss is not finite, and `DataError` if images or `classes` do not fit.

    >>> import lockstep
    >>> result = lockstep.evaluate("run", "data", checkpoint="best")
    >>> result["images"], 0 <= result["top1_percent"] <= result["top5_percent"] <= 100
    (20, True)
    """
    execution = execution or Execution()
    choice = choose(source, checkpoint, ema, model, preprocessing)
    export = find_export(choice, runtime, execution)
    if isinstance(export, ExportedProgram):
        export.check_options(precision, ranks=count_ranks())
    weights = open_source(choice) if export is None else export.about
    wants_calibration = calibrate or precision_at is not None
    calibrator = Calibrator(weights, precision_at) if wants_calibration else None
    weights = weights.replace_classes(classes)
    images = find_evaluation_images(data, weights.recipe, split, run=Path(choice.source))
    if isinstance(export, ExportedProgram):
        return _evaluate_program(export, weights, images, execution, batch, Recorder(listener))
    name = runtime or (AUTO if export else NATIVE)
    sizes: dict[str, Any] = {"most_images": batch, "exported": export}
    with open_computation(name, weights, precision, execution, listener, **sizes) as computation:
        result = _evaluate_weights(computation, weights, images, execution, batch, calibrator)
    if export is None:
        result["remarks"] += remark_on_weights(Path(choice.source), runtime)
    return result


def _evaluate_weights(
    computation: Computation,
    weights: Weights,
    images: EvaluationImages,
    execution: Execution,
    batch: int,
    calibrator: Calibrator | None,
) -> dict[str, Any]:
    """Return the result of an evaluation by all ranks, with a calibration if there is a
    `calibrator`. `weights` are as they were opened."""
    if calibrator is not None:
        computation = calibrator.watch(computation)
    recipe = computation.weights.recipe
    matched, remarks = images.open_index(computation.weights, computation.recorder)
    index = matched.index
    if calibrator is not None and recipe.eval_flips:
        remarks.append("calibrated and evaluated without mirror images, as predict computes")
    place = {"rank": computation.rank, "ranks": computation.ranks}
    total = math.ceil(len(index) / (batch * computation.ranks))
    pace = Pace()
    with open_evaluation(index, recipe, execution, batch, **place) as batches:
        watched = computation.recorder.watch("evaluating", batches, total)
        scores = computation.evaluate(pace.watch(watched))
    if computation.runtime == NATIVE:
        recipe = recipe.evaluation_recipe()
    calibration = {} if calibrator is None else calibrator.store(computation.recorder.warn)
    return {
        "remarks": remarks,
        "runtime": computation.runtime,
        "precision": recipe.precision,
        **_describe_scores(scores, weights, images, matched, remarks),
        "speed": pace.describe_speed(batch_images=batch, on_gpu=computation.on_gpu),
        **calibration,
    }


def _evaluate_program(
    program: ExportedProgram,
    weights: Weights,
    images: EvaluationImages,
    execution: Execution,
    batch: int,
    recorder: Recorder,
) -> dict[str, Any]:
    """Return the result of a program in its own runtime. It gets whole photos if it takes them."""
    recipe = weights.recipe
    matched, remarks = images.open_index(weights, recorder)
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
        scores = compute_scores(runtime, pace.watch(recorder.watch("evaluating", batches, total)))
    return {
        "remarks": remarks,
        "runtime": program.runtime,
        "precision": program.precision,
        **_describe_scores(scores, weights, images, matched, remarks),
        "speed": pace.describe_speed(batch_images=batch, on_gpu=False),
    }


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
) -> dict[str, Any]:
    """Return the part of a result that follows from the scores, and add a remark if the order of
    classes is not proven. Raises `DivergedError` if a score is not finite."""
    index = matched.index
    name = images.source.title
    if infinite := describe_nonfinite(scores):
        about_nan = "".join(f" {remark}." for remark in weights.remarks if "NaN" in remark)
        raise DivergedError(
            f"the loss of {weights.source} on {name} is not finite: {infinite}.{about_nan} {ADVICE}"
        )
    counts = scores.counts()
    summary = counts.summary()
    per_class = scores.per_class(len(index.classes))
    orders = compare_orders(scores, matched)
    if orders:
        remarks.append(describe_orders(orders, counts.images))
    return {
        "source": str(weights.source),
        "data": name,
        **summary,
        "published": _compare_published(weights, summary, len(index.classes)),
        "quarantined": index.describe_quarantine(),
        "classes": index.classes,
        "class_orders": orders,
        "top1_interval_percent": [100 * bound for bound in wilson(counts.top1, counts.images)],
        "per_class": per_class,
        "class_summary": summarise_classes(per_class),
    }


def _compare_published(weights: Weights, summary: Summary, classes: int) -> Comparison | None:
    """Return a top-1 next to the published ones of the weights' recipe. Other programs' files do
    not say their precision."""
    return compare_top1(
        weights.recipe,
        top1_percent=summary["top1_percent"],
        images=summary["images"],
        classes=classes,
        precision=weights.recipe.precision if weights.origin == LOCKSTEP else None,
        epochs=weights.epochs,
    )
