"""Evaluate trained weights, or an exported program, on a data set."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.inference.calibrator import Calibrator
from lockstep.inference.engines import ADVICE
from lockstep.inference.evaluation_images import (
    EvaluationImages,
    find_evaluation_images,
)
from lockstep.inference.label_matching import Matched, compare_orders, describe_orders
from lockstep.inference.photo_batches import group_photos, load_photos
from lockstep.inference.programs import ExportedProgram
from lockstep.inference.runtimes import NATIVE
from lockstep.inference.runtimes.scores import Pace, Speed, compute_scores
from lockstep.inference.session import Session, SessionOptions, open_session
from lockstep.inference.source import ModelSource
from lockstep.models.accuracy_interval import format_accuracy, wilson
from lockstep.models.class_metrics import summarise_classes
from lockstep.models.metrics import Scores, measure
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published_accuracies import Comparison, compare_top1
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DivergedError
from lockstep.system.ranks import count_ranks
from lockstep.weights import LOCKSTEP, Weights


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of an evaluation. Every image counts once."""

    source: str
    """The weights, or the export."""
    data: str
    """What the images are called."""
    runtime: str
    """What computed."""
    precision: str
    metrics: dict[str, Any]
    """Numbers of all images by their keys, such as `top1_percent` and `loss`: the usual ones, the
    recipe's `selection`, and those that the execution names."""
    interval: tuple[float, float]
    """The 95 % interval of top-1, in percent."""
    classes: list[str]
    per_class: Any
    """Counts of each class (`models.class_metrics`)."""
    class_summary: Any
    class_orders: Any
    """The accuracy in other orders of folders (`label_matching`)."""
    published: Comparison | None
    """The top-1 next to published ones; None if there are none."""
    quarantined: list[Any]
    """Images that cannot be read, which are left out."""
    speed: Speed
    remarks: list[str]
    calibration: dict[str, Any] = field(default_factory=dict)
    """What was stored with the checkpoint (`inference.calibrator`); empty if that was not asked
    for."""

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.metrics["images"])

    @property
    def top1(self) -> float:
        """The share of images whose likeliest class is their label, in percent."""
        return float(self.metrics["top1_percent"])

    def __repr__(self) -> str:
        accuracy = format_accuracy(self.top1, self.images)
        return f"Evaluation(top-1 {accuracy} of {self.images} images of {self.data})"

    def to_json(self) -> dict[str, Any]:
        """Return what `lockstep evaluate --json` prints."""
        values = asdict(self)
        values |= values.pop("metrics")
        values |= values.pop("calibration")
        values["top1_interval_percent"] = list(values.pop("interval"))
        return values


def evaluate(
    source: ModelSource,
    data: str | Path | None,
    options: SessionOptions,
    *,
    split: float | None = None,
    calibrate: bool = False,
    precision_at: float | None = None,
) -> Evaluation:
    """Return what `Model.evaluate` returns."""
    export = source.find_export(options)
    if isinstance(export, ExportedProgram):
        export.check_options(options.precision, ranks=count_ranks())
    weights = source.choose_weights(export)
    wants_calibration = calibrate or precision_at is not None
    calibrator = Calibrator(weights, precision_at) if wants_calibration else None
    images = find_evaluation_images(data, weights.recipe, split, run=source.path)
    if isinstance(export, ExportedProgram):
        return _evaluate_program(export, weights, images, options)
    with open_session(weights, options, exported=export) as session:
        result = _evaluate_weights(session, weights, images, options, calibrator)
    if export is None:
        result.remarks.extend(source.remark_on_program(options.runtime))
    return result


def _evaluate_weights(
    session: Session,
    weights: Weights,
    images: EvaluationImages,
    options: SessionOptions,
    calibrator: Calibrator | None,
) -> Evaluation:
    """Return the result of an evaluation by all ranks, with a calibration if there is a
    `calibrator`. `weights` are as they were opened."""
    batch = options.batch
    if calibrator is not None:
        session = calibrator.watch(session)
    recipe = session.weights.recipe
    matched, remarks = images.open_index(session.weights, session.recorder)
    index = matched.index
    if calibrator is not None and recipe.eval_flips:
        remarks.append("calibrated and evaluated without mirror images, as predict computes")
    place = {"rank": session.rank, "ranks": session.ranks}
    total = math.ceil(len(index) / (batch * session.ranks))
    pace = Pace()
    with open_evaluation(index, recipe, options.execution, batch, **place) as batches:
        watched = session.recorder.watch("evaluating", batches, total)
        scores = session.evaluate(pace.watch(watched))
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
) -> Evaluation:
    """Return the result of a program in its own runtime. It gets whole photos if it takes them."""
    recorder = Recorder(options.listener)
    recipe = weights.recipe
    execution = options.execution
    batch = options.batch
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
        "published": _compare_published(weights, metrics, len(index.classes)),
        "quarantined": index.describe_quarantine(),
        "classes": index.classes,
        "class_orders": orders,
        "interval": (100 * low, 100 * high),
        "per_class": per_class,
        "class_summary": summarise_classes(per_class),
    }


def _compare_published(
    weights: Weights, metrics: dict[str, Any], classes: int
) -> Comparison | None:
    """Return a top-1 next to the published ones of the weights' recipe. Other programs' files do
    not say their precision."""
    return compare_top1(
        weights.recipe,
        top1_percent=metrics["top1_percent"],
        images=metrics["images"],
        classes=classes,
        precision=weights.recipe.precision if weights.origin == LOCKSTEP else None,
        epochs=weights.epochs,
    )
