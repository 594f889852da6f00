"""Compare runs: results with their intervals, agreement, speed, recipes and environments."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.listing import printable
from lockstep.models.metrics import WARMUP_STEPS, is_top5_informative, wilson
from lockstep.recipes import Recipe
from lockstep.recipes.published_accuracies import Comparison
from lockstep.recipes.published_speeds import Measured, Row, read_speeds
from lockstep.reporting import image_statistics
from lockstep.runs.reading import Run
from lockstep.runs.report import Evaluation, compare_with_published
from lockstep.system.event_log import EvaluateEvent, TrainEvent, seconds_of
from lockstep.system.strict_json import is_positive

PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True)
class Result:
    """The accuracy of some weights of a run."""

    run: int
    weights: str
    step: int
    images: int
    loss: float | None
    """None or infinite if the loss is not finite."""
    top1: float
    top1_interval: tuple[float, float]
    """Wilson's 95 % interval. Shares are within 0 to 1."""
    top5: float | None
    top5_interval: tuple[float, float] | None
    """None if there are too few classes for top-5 to show anything."""
    calibration_error: float | None
    """None if the run kept no results of single images."""


@dataclass(frozen=True)
class Speed:
    """How fast a run was trained and evaluated."""

    run: int
    images_per_sec: float | None
    data_wait_share: float | None
    train_sec: float
    step_ms: dict[int, float]
    """Percentiles of the milliseconds of a step. Each value is the mean of a log interval. Empty if
    all was warm-up."""
    intervals: int
    evaluated_images_per_sec: float | None


def results(runs: Sequence[Run]) -> list[Result]:
    """Return the newest evaluation of every run and its weights."""
    return [
        _result(number, run, weights, entry)
        for number, run in enumerate(runs)
        for weights, entry in run.final.items()
    ]


def _result(number: int, run: Run, weights: str, entry: Evaluation | EvaluateEvent) -> Result:
    images = entry["images"]
    top1, top5 = (round(entry[name] * images / 100) for name in ("top1_percent", "top5_percent"))
    tells = run.class_count is None or is_top5_informative(run.class_count)
    scores = run.results.scores.get(weights) if run.results else None
    error = None
    if scores is not None:
        error = image_statistics.expected_calibration_error(
            image_statistics.reliability(scores.confidences, scores.ranks < 1)
        )
    return Result(
        run=number,
        weights=weights,
        step=entry["step"],
        images=images,
        loss=entry["loss"],
        top1=top1 / images,
        top1_interval=wilson(top1, images),
        top5=top5 / images if tells else None,
        top5_interval=wilson(top5, images) if tells else None,
        calibration_error=error,
    )


def agreement(runs: Sequence[Run]) -> list[list[float | None]]:
    """Return the share of validation images that two runs' trained weights put into the same class,
    for all pairs.

    None if a run has no results of single images, or if they are of other images.
    """
    return [[_agreement(a, b) for b in runs] for a in runs]


def _agreement(a: Run, b: Run) -> float | None:
    if a.results is None or b.results is None or a.results.digest != b.results.digest:
        return None
    left, right = (run.results.scores["trained"].predictions for run in (a, b) if run.results)
    return float((left == right).mean())


def speeds(runs: Sequence[Run]) -> list[Speed]:
    """Return the speed of every run that has started training. First steps of a process and
    profiled steps are left out."""
    return [_speed(number, run) for number, run in enumerate(runs) if run.training]


def _speed(number: int, run: Run) -> Speed:
    entries = _after_warmup(run)
    images = sum(e["images"] for e in entries)
    seconds = sum(seconds_of(e) for e in entries)
    times = [1000 * seconds_of(entry) / (entry["step"] - entry["first_step"]) for entry in entries]
    evaluated = [entry["images_per_sec"] for entry in run.evaluations]
    return Speed(
        run=number,
        images_per_sec=images / seconds if entries else None,
        data_wait_share=sum(e["data_wait_share"] * seconds_of(e) for e in entries) / seconds
        if entries
        else None,
        train_sec=sum(seconds_of(entry) for entry in run.training),
        step_ms={p: float(np.percentile(times, p)) for p in PERCENTILES} if times else {},
        intervals=len(entries),
        evaluated_images_per_sec=float(np.median(evaluated)) if evaluated else None,
    )


def _after_warmup(run: Run) -> list[TrainEvent]:
    found = []
    warm_from = WARMUP_STEPS
    for entry in run.log:
        if entry["kind"] == "start":
            warm_from = entry["step"] + WARMUP_STEPS
        elif (
            entry["kind"] == "train" and entry["first_step"] >= warm_from and "traced" not in entry
        ):
            found.append(entry)
    return found


def published_accuracies(runs: Sequence[Run]) -> list[tuple[int, Comparison]]:
    """Return, for every finished run whose recipe has published accuracies, its number and its
    top-1 next to them."""
    found = [
        (number, compare_with_published(run.recipe, run.report))
        for number, run in enumerate(runs)
        if run.report is not None
    ]
    return [(number, comparison) for number, comparison in found if comparison is not None]


def published_speeds(
    runs: Sequence[Run], measured: Sequence[Speed]
) -> list[tuple[int, Row, float | None]]:
    """Return the number of each run with every published speed of its model, precision and
    hardware, and with the quotient.

    The quotient is the run's images per second divided by the published ones. It is None unless
    batch and image size are the same too. Rows with another number of accelerators are left out.
    """
    found = [(speed.run, _measured(runs[speed.run], speed)) for speed in measured]
    return [
        (number, row, ours.ratio(row))
        for number, ours in found
        if ours is not None
        for row in read_speeds()
        if row.images_per_sec
        and ours.is_of_same_model(row)
        and ours.is_on_same_hardware(row)
        and ours.is_in_same_precision(row)
    ]


def _measured(run: Run, speed: Speed) -> Measured | None:
    """Return the speed of a run in training; None if there is none, or if its model or number of
    ranks is unknown."""
    recipe = run.recipe
    ranks = run.environment.get("ranks")
    if (
        speed.images_per_sec is None
        or not isinstance(recipe.model, str)
        or ranks is None
        or not is_positive(ranks)
    ):
        return None
    batch, rest = divmod(recipe.global_batch_images, ranks)
    return Measured(
        model=recipe.model,
        kind="train",
        hardware=str(run.environment.get("device", "")),
        accelerators=ranks,
        precision=recipe.precision,
        batch_images=None if rest else batch,
        image_size=recipe.image_size,
        images_per_sec=speed.images_per_sec,
    )


def recipe_fields(runs: Sequence[Run]) -> list[tuple[str, str, list[str], bool]]:
    """Return every field of the recipes: name, what it means, the runs' values, and whether they
    differ."""
    every = [run.recipe.fields() for run in runs]
    return [
        (
            name,
            _meaning(name),
            [str(fields[name]) for fields in every],
            any(f[name] != every[0][name] for f in every),
        )
        for name in every[0]
    ]


def published_differences(run: Run) -> list[tuple[str, str, str, str]]:
    """Return the fields in which a run differs from its nearest published recipe: name, meaning,
    published, the run's."""
    _, fields = run.nearest_recipe
    return [(name, _meaning(name), str(theirs), str(own)) for name, (theirs, own) in fields.items()]


def _meaning(name: str) -> str:
    return (Recipe.model_fields[name].description or "").replace("\n", " ")


def environments(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Return what environment.json says of every run: name, values ("" if a run has none), and
    whether they differ."""
    every = [_flat(run.environment) for run in runs]
    names = dict.fromkeys(name for values in every for name, value in values.items() if value)
    rows = [(name, [values.get(name, "") for values in every]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif name == "command" and isinstance(value, list):
            found[f"{prefix}{name}"] = printable(shlex.join(map(str, value)))
        elif isinstance(value, list):
            found[f"{prefix}{name}"] = printable(", ".join(map(str, value[:5]))) + (
                f" and {len(value) - 5} more" if len(value) > 5 else ""
            )
        elif name.endswith("_bytes"):
            found[prefix + name.removesuffix("_bytes")] = f"{value / 2**30:.1f} GiB"
        else:
            found[f"{prefix}{name}"] = printable(str(value))
    return found
