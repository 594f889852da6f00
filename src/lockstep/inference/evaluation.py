"""Evaluate trained weights on a data set."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.data import Batch
from lockstep.data.index import Index, open_index
from lockstep.data.loading.loaders import make_loader
from lockstep.data.sources import Source, find_source, find_split, holds_split
from lockstep.data.split import divide_index, whole_source
from lockstep.inference.computation import computing, export_to_run
from lockstep.inference.loaded_engine import ADVICE
from lockstep.inference.programs import (
    PROGRAM,
    ExportedProgram,
    check_alone,
    group_photos,
    load_photos,
    open_weights_or_advise,
    program_to_run,
    remarks_on_weights,
)
from lockstep.inference.runtimes import AUTO, NATIVE
from lockstep.inference.runtimes.scoring import Pace
from lockstep.inference.runtimes.scoring import scores as scores_of
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import evaluation_plans
from lockstep.recipes.published_accuracies import Comparison, compare_top1
from lockstep.runs.divergence import describe_nonfinite
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.deprecation import accept_old_names
from lockstep.system.errors import BackendError, DataError, DivergedError
from lockstep.system.event_log import Summary
from lockstep.weights import LOCKSTEP, Classes, Preprocessing, Weights
from lockstep.weights.class_names import assume_classes, imagenet_synsets


@accept_old_names(engine="runtime", which="checkpoint", batch_images="batch")
def evaluate(
    source: str | Path,
    data: str | Path,
    *,
    checkpoint: str = "newest",
    ema: bool = False,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
    split: float | None = None,
    batch: int = 32,
    runtime: str | None = None,
    execution: Execution | None = None,
    preprocessing: Preprocessing | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Return accuracy, loss and per-class counts on the validation images of `data`, or on all
    images if it has none.

    If `data` has no validation images and the weights come from a run that set a share of its
    images apart for validation, that share is evaluated. `split` is a different share; 0 evaluates
    all images.

    Every image counts once. `classes` replaces the names of the weights' classes: names, class 0
    first, or a file that lists them. If the images have names of classes too, an image's label is
    the output with that name.

    `runtime` is "native" (the execution's backend; the default), another runtime such as
    "onnxruntime", or "auto": the fastest installed one that keeps the bound (docs/deploy.md). An
    ONNX model that `export` wrote is run as it is, by default with the first of ONNX Runtime and
    OpenVINO that is installed. "native", or an execution with another backend than the default,
    reads the weights in it instead.

    "program" runs the program of any target of `export` in its own runtime as it is deployed: one
    that takes photos gets whole photos. It is the default for "triton" and "openvino", whose
    programs can only compute. Programs of the other targets can run code, so they are run only if
    asked for: do it if you trust who wrote them.

    `speed` of the result is how fast images were evaluated
    (`lockstep.inference.runtimes.scoring.Speed`). `published` of the result is its top-1 next to
    those published for the weights' recipe (`lockstep.recipes.published_accuracies.Comparison`), or
    None if nobody published one.

    `model` names the model of a file that fits several, such as resnet50 and resnet50-v1.
    `preprocessing` is how images are prepared, where the weights do not say it: fields of a recipe
    such as `{"image_size": 48}`, or a recipe whose evaluation is used. `precision` replaces the
    recipe's precision. By default, fp32 replaces a precision that this processor only emulates, and
    `listener` gets a note about it. "native" evaluates in fp32 instead of fp16. With several
    processes (torchrun), every process calls this and gets the result.

    Raises `DivergedError` if a loss is not a finite number, and `DataError` if images or `classes`
    do not fit the weights.

    >>> import lockstep
    >>> result = lockstep.evaluate("run", "data", checkpoint="best")
    >>> result["images"], 0 <= result["top1_percent"] <= result["top5_percent"] <= 100
    (20, True)
    """
    execution = execution or Execution()
    runs_files = checkpoint == "newest" and not ema and model is None and preprocessing is None
    if runtime == PROGRAM and not runs_files:
        raise BackendError(
            f"an exported program holds what it computes; leave out --runtime {PROGRAM}, or what"
            " changes it"
        )
    exported = (
        export_to_run(Path(source), runtime, execution)
        if runs_files and runtime != PROGRAM
        else None
    )
    program = (
        program_to_run(Path(source), runtime, execution)
        if runs_files and exported is None
        else None
    )
    if program is not None:
        how: dict[str, Any] = {
            "classes": classes,
            "split": split,
            "batch": batch,
            "listener": listener,
        }
        return _evaluate_program(program, Path(data), execution, precision, **how)
    name = runtime or (NATIVE if exported is None else AUTO)
    chosen: dict[str, Any] = {
        "checkpoint": checkpoint,
        "ema": ema,
        "model": model,
        "preprocessing": preprocessing,
    }
    opened = open_weights_or_advise(source, **chosen) if exported is None else exported.about
    opened = opened.replace_classes(classes)
    data = Path(data)
    images, share = _evaluated(data, opened.recipe, split)
    pace = Pace()
    with computing(
        name, opened, precision, execution, listener, most_images=batch, exported=exported
    ) as found:
        weights = found.weights
        recorder = found.recorder
        recipe = found.weights.recipe
        index, remarks = _indexed(images, share, weights, recorder)
        if exported is None:
            remarks += remarks_on_weights(Path(source), runtime)
        total = math.ceil(len(index) / (batch * found.ranks))
        plans = evaluation_plans(
            recipe, index.sizes_for(recipe), batch, rank=found.rank, ranks=found.ranks
        )
        with make_loader(
            index, recipe, execution, size=recipe.eval_crop, evaluation=True
        ) as loader:
            batches = recorder.watch("evaluating", loader.batches(plans), total)
            scores = found.evaluate(pace.watched(batches))
    return {
        "remarks": remarks,
        "runtime": found.runtime,
        "precision": (
            recipe.evaluation_recipe().precision if found.runtime == NATIVE else recipe.precision
        ),
        **_described(scores, opened, images, index),
        "speed": pace.speed(batch_images=batch, on_gpu=found.on_gpu),
    }


def _evaluate_program(
    program: ExportedProgram,
    data: Path,
    execution: Execution,
    precision: str | None,
    *,
    classes: Classes | None,
    split: float | None,
    batch: int,
    listener: Listener | None,
) -> dict[str, Any]:
    """Return what `evaluate` does, from a program in its own runtime. It gets whole photos if it
    takes them."""
    if precision is not None:
        raise BackendError(
            f"{program.folder} computes in {program.precision}; leave out precision, or add"
            f" --runtime {NATIVE}"
        )
    check_alone(int(os.environ.get("WORLD_SIZE", "1")))
    weights = program.about.replace_classes(classes)
    recipe = weights.recipe
    recorder = Recorder(listener)
    pace = Pace()
    images, share = _evaluated(data, recipe, split)
    index, remarks = _indexed(images, share, weights, recorder)
    groups = group_photos(index.sizes_for(recipe), batch)
    total = len(groups) if program.takes_photos else math.ceil(len(index) / batch)
    if program.takes_photos:
        batches = load_photos(index, recipe, groups)
    else:
        batches = _load_squares(index, recipe, execution, batch)
    with program.load() as runtime:
        scores = scores_of(runtime, pace.watched(recorder.watch("evaluating", batches, total)))
    return {
        "remarks": remarks,
        "runtime": program.runtime,
        "precision": program.precision,
        **_described(scores, weights, images, index),
        "speed": pace.speed(batch_images=batch, on_gpu=False),
    }


def _load_squares(
    index: Index, recipe: Recipe, execution: Execution, batch: int
) -> Iterator[Batch]:
    """Yield the squares of all images."""
    plans = evaluation_plans(recipe, index.sizes_for(recipe), batch)
    with make_loader(index, recipe, execution, size=recipe.eval_crop, evaluation=True) as loader:
        yield from loader.batches(plans)


def _described(scores: Scores, weights: Weights, images: Source, index: Index) -> dict[str, Any]:
    """Return the part of a result that follows from the scores. Raises `DivergedError` if one is
    not finite."""
    if infinite := describe_nonfinite(scores):
        raise DivergedError(
            f"the loss of {weights.source} on {images.title} is not finite: {infinite}. {ADVICE}"
        )
    summary = scores.counts().summary()
    return {
        "source": str(weights.source),
        "data": images.title,
        **summary,
        "published": _published(weights, summary, len(index.classes)),
        "quarantined": index.describe_quarantine(),
        "classes": index.classes,
        "per_class": scores.per_class(len(index.classes)),
    }


def _published(weights: Weights, summary: Summary, classes: int) -> Comparison | None:
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


def _evaluated(data: Path, recipe: Recipe, split: float | None) -> tuple[Source, float]:
    """Return the images, and the share of them that is set apart for validation; 0 means all are
    evaluated."""
    if split is None and holds_split(data, "val"):
        return find_split(data, "val"), 0.0
    share = (
        recipe.validation_share
        if split is None
        else recipe.replace(validation_share=split).validation_share
    )
    return whole_source(data) if share or split is not None else find_source(data), share


def _indexed(
    images: Source, share: float, weights: Weights, recorder: Recorder
) -> tuple[Index, list[str]]:
    """Return the index of the images to evaluate, and remarks on them and on the weights."""
    index = open_index(
        images, classes=weights.classes or None, progress=recorder.progress("indexing")
    )
    remarks = list(weights.remarks)
    if not weights.classes and len(index.classes) < weights.recipe.logits:
        if assume_classes(weights.recipe) and set(index.classes) <= set(imagenet_synsets()):
            # A part of ImageNet: the numbers of the folders are not those of the outputs.
            index = open_index(
                images, classes=imagenet_synsets(), progress=recorder.progress("indexing")
            )
            remarks.append(
                "the weights name no classes; the folders are synsets of ImageNet, so its classes"
                " are assumed"
            )
        else:
            remarks.append(
                f"the weights name no classes: the {len(index.classes)} folders, in alphabetical"
                f" order, are taken for the first of {weights.recipe.logits} outputs; --classes"
                " FILE names the outputs"
            )
    if share:
        images_in_all = len(index)
        index = divide_index(index, share)[1]
        remarks.append(
            f"evaluates the share of {share:g} that is set apart for validation, {len(index)} of"
            f" {images_in_all} images; --split 0 evaluates all"
        )
    logits = weights.recipe.logits
    if len(index.classes) > logits:
        raise DataError(
            f"{images.title} has {len(index.classes)} classes, but the model has {logits} logits"
        )
    return index, remarks
