"""Compare runs: results with their intervals, agreement, speed, recipes and environments."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from lockstep.data.images import printable
from lockstep.models.accuracy_interval import wilson
from lockstep.models.latency import PERCENTILES
from lockstep.models.metrics import Metric, list_metrics, measure
from lockstep.recipes import Recipe
from lockstep.recipes.field_descriptions import describe_fields
from lockstep.recipes.published_accuracies import Comparison
from lockstep.recipes.published_speeds import Measured, Row, read_speeds
from lockstep.runs.calibrated_results import calibrate_scores
from lockstep.runs.reading import Run
from lockstep.runs.report import Evaluation, compare_with_published
from lockstep.system.event_log import (
    EvaluateEvent,
    compute_seconds,
    measure_throughput,
    select_warm,
)
from lockstep.system.strict_json import is_count
from lockstep.system.text import list_first
from lockstep.weights.calibration import bin_confidences, compute_calibration_error


@dataclass(frozen=True)
class Result:
    """The accuracy of some weights of a run."""

    run: int
    weights: str
    step: int
    images: int
    values: Mapping[str, Any]
    """The values of metrics by key."""
    metrics: list[Metric]
    """The metrics to show."""
    calibration_error: float | None
    """None if the run kept no results of single images."""
    basis: str = ""
    """Which temperature the calibration error belongs to."""
    is_best: bool = False
    """Whether it is the result of the run's best checkpoint."""

    @property
    def top1(self) -> float:
        """The accuracy, within 0 to 1."""
        return float(self.values["top1_percent"]) / 100

    def interval(self, key: str = "top1_percent") -> tuple[float, float]:
        """Return Wilson's 95 % interval of a share of images, within 0 to 1."""
        return wilson(round(self.values[key] * self.images / 100), self.images)


@dataclass
class Speed:
    """How fast a run was trained and evaluated. None if it was not, or if all was warm-up."""

    run: int
    train_sec: float
    intervals: int
    images_per_sec: float | None = None
    data_wait_share: float | None = None
    step_ms: dict[int, float] = field(default_factory=dict)
    """Percentiles of the milliseconds of a step. Each value is the mean of a log interval."""
    evaluated_images_per_sec: float | None = None


def list_results(runs: Sequence[Run]) -> list[Result]:
    """Return the best evaluation of every run, and the newest one of its weights."""
    results = []
    for number, run in enumerate(runs):
        own = [_build_result(number, run, *item) for item in run.final.items()]
        best = run.best
        if best is not None and all(result.step != best["step"] for result in own):
            own.append(_build_result(number, run, best["weights"], best))
        results += sorted(own, key=lambda result: not result.is_best)
    return results


def _build_result(number: int, run: Run, weights: str, entry: Evaluation | EvaluateEvent) -> Result:
    values: dict[str, Any] = {}
    error = None
    basis = ""
    results = run.find_results(entry["step"], weights)
    if results is not None:
        scores, basis = calibrate_scores(run, results, weights)
        error = compute_calibration_error(bin_confidences(scores.confidences, scores.ranks < 1))
        values |= measure(scores, len(run.classes))  # logs of older versions do not have them all
    values |= entry
    return Result(
        run=number,
        weights=weights,
        step=entry["step"],
        images=entry["images"],
        values=values,
        metrics=list_metrics(values, run.class_count or sys.maxsize),
        calibration_error=error,
        basis=basis,
        is_best=run.is_best(entry["step"], weights),
    )


def compare_predictions(runs: Sequence[Run]) -> list[list[float | None]]:
    """Return the share of validation images that two runs' trained weights put into the same class,
    for all pairs.

    None if a run has no results of single images, or if they are of other images.
    """
    return [[_compare_pair(a, b) for b in runs] for a in runs]


def has_pairs(agreement: Sequence[Sequence[float | None]]) -> bool:
    """Return whether there is a share for two different runs."""
    return any(row[:number].count(None) < number for number, row in enumerate(agreement))


def _compare_pair(a: Run, b: Run) -> float | None:
    if a.results is None or b.results is None or a.results.digest != b.results.digest:
        return None
    left = a.results.scores.get("trained")
    right = b.results.scores.get("trained")
    if left is None or right is None or left.labels.shape != right.labels.shape:
        return None
    return float((left.predictions == right.predictions).mean())


def measure_speeds(runs: Sequence[Run]) -> list[Speed]:
    """Return the speed of every run that has started training. First steps of a process and
    profiled steps are left out."""
    return [_measure_speed(number, run) for number, run in enumerate(runs) if run.training]


def _measure_speed(number: int, run: Run) -> Speed:
    step_ms = [
        1000 * compute_seconds(entry) / (entry["step"] - entry["first_step"])
        for entry in select_warm(run.log)
    ]
    speed = Speed(
        run=number, train_sec=sum(map(compute_seconds, run.training)), intervals=len(step_ms)
    )
    speed.images_per_sec, speed.data_wait_share = measure_throughput(run.log)
    if step_ms:
        percentiles = np.percentile(step_ms, PERCENTILES).tolist()
        speed.step_ms = dict(zip(PERCENTILES, percentiles, strict=True))
    if run.evaluations:
        rates = [entry["images_per_sec"] for entry in run.evaluations]
        speed.evaluated_images_per_sec = float(np.median(rates))
    return speed


def compare_accuracies(runs: Sequence[Run]) -> list[tuple[int, Comparison]]:
    """Return, for every finished run whose recipe has published accuracies, its number and its
    top-1 next to them."""
    comparisons = []
    for number, run in enumerate(runs):
        if run.report is not None:
            comparison = compare_with_published(run.recipe, run.report)
            if comparison is not None:
                comparisons.append((number, comparison))
    return comparisons


def compare_speeds(
    runs: Sequence[Run], speeds: Sequence[Speed]
) -> list[tuple[int, Row, float | None]]:
    """Return the number of each run with every published speed of its model, precision and
    hardware, and with the ratio.

    The ratio is the run's images per second divided by the published ones. It is None unless
    batch and image size are the same too. Rows with another number of accelerators are left out.
    """
    rows = []
    for speed in speeds:
        ours = _describe_speed(runs[speed.run], speed)
        if ours is not None:
            for row in read_speeds():
                is_alike = ours.is_of_same_model(row) and ours.is_on_same_hardware(row)
                if row.images_per_sec and is_alike and ours.is_in_same_precision(row):
                    rows.append((speed.run, row, ours.ratio(row)))
    return rows


def _describe_speed(run: Run, speed: Speed) -> Measured | None:
    """Return the speed of a run in training; None if there is none, or if its model or number of
    ranks is unknown."""
    recipe = run.recipe
    ranks = run.environment.get("ranks")
    if speed.images_per_sec is None or not isinstance(recipe.model, str) or ranks is None:
        return None
    batch, rest = divmod(recipe.global_batch_images, ranks)
    return Measured(
        model=recipe.model,
        kind="train",
        hardware=str(run.environment.get("device", "")),
        accelerators=ranks,
        precision=recipe.precision,
        batch_images=None if rest else batch,
        image_size=None if recipe.image_sizes else recipe.image_size,
        images_per_sec=speed.images_per_sec,
    )


def list_recipe_fields(runs: Sequence[Run]) -> list[tuple[str, str, list[str], bool]]:
    """Return every field of the recipes: name, what it means, the runs' values, and whether they
    differ."""
    recipes = [run.recipe.fields() for run in runs]
    rows = []
    for name in recipes[0]:
        values = [fields[name] for fields in recipes]
        differ = values != [values[0]] * len(values)
        rows.append((name, _explain_field(name), list(map(str, values)), differ))
    return rows


def list_published_differences(run: Run) -> list[tuple[str, str, str, str]]:
    """Return the fields in which a run differs from its nearest published recipe: name, meaning,
    published, the run's."""
    _, fields = run.nearest_recipe
    rows = []
    for name, (theirs, own) in fields.items():
        rows.append((name, _explain_field(name), str(theirs), str(own)))
    return rows


def _explain_field(name: str) -> str:
    return describe_fields(Recipe)[name].replace("\n", " ")


def list_environments(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Return what environment.json says of every run: name, values ("" if a run has none), and
    whether they differ."""
    columns = [_flatten(run.environment) for run in runs]
    rows = []
    for name in dict.fromkeys(chain(*columns)):
        values = [column.get(name, "") for column in columns]
        if any(values):
            rows.append((name, values, len(set(values)) > 1))
    return rows


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values within values as texts, with names such as execution.backend."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, dict):
            texts |= _flatten(value, f"{name}.")
        elif key == "command" and isinstance(value, list):
            texts[name] = printable(shlex.join(map(str, value)))
        elif isinstance(value, list):
            texts[name] = printable(list_first([*map(str, value)], 5))
        elif key.endswith("_bytes") and is_count(value):
            texts[name.removesuffix("_bytes")] = f"{value / 2**30:.1f} GiB"
        else:
            texts[name] = printable(str(value))
    return texts
