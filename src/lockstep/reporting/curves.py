"""Turn the log of a run into curves over steps, thinned to what a plot can show."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from lockstep.models.metrics import LOGGED, Metric, list_metrics
from lockstep.reporting.same_images import group_runs, name_group
from lockstep.runs.reading import Run

MOST_POINTS = 1500
"""A curve is thinned to at most this many points; a plot is about 1000 pixels wide."""

Kind = Literal["training", "validation", "moving average"]
Points = dict[Kind, list[tuple[int, float]]]
"""Steps done and values of a run, for each curve."""
Reader = Callable[[Run], Points]


@dataclass(frozen=True)
class Curve:
    """Values of a run over steps. None stands for NaN and infinity."""

    run: int
    """Number of the run on the page."""
    kind: Kind
    steps: list[int]
    """Optimizer steps done at each value."""
    values: list[float | None]


@dataclass(frozen=True)
class Chart:
    """Curves of all runs in one plot."""

    name: str
    title: str
    unit: str
    """Written after values: "", " %", " images/s"."""
    curves: list[Curve]
    logarithmic: bool = False
    note: str = "Nothing to draw in these steps."
    """Written in a plot that has no points."""


_DIFFERENCE = "Training loss: relative difference from the first run"
_EQUAL = "No difference in these steps."


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the plots of some runs: loss, accuracy, learning rate, throughput, data wait, and
    others if there is data."""
    build = partial(_build_curves, runs)
    rates = build(partial(_read_training, "lr"))
    speeds = build(partial(_read_speeds, "images_per_sec", 1))
    waits = build(partial(_read_speeds, "data_wait_share", 100))
    scales = build(_read_scales)
    accuracy = Chart("accuracy", "Top-1 accuracy", " %", [])
    charts = _split_by_images(runs, Chart("loss", "Loss", "", []), "loss", _read_losses)
    charts += _split_by_images(runs, accuracy, "top1_percent")
    for metric in _list_named_metrics(runs):
        chart = Chart(metric.name, metric.heading, metric.unit, [])
        charts += _split_by_images(runs, chart, metric.key)
    charts += [
        Chart("difference", _DIFFERENCE, "", _compare_losses(runs), logarithmic=True, note=_EQUAL),
        Chart("lr", "Learning rate", "", rates),
        Chart("throughput", "Training throughput", " images/s", speeds),
        Chart("wait", "Waiting for data", " %", waits),
        Chart("scale", "Loss scale", "", scales, logarithmic=True),
    ]
    return [chart for chart in charts if chart.curves]


def _list_named_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics that the last evaluations have because settings name them."""
    metrics: dict[str, Metric] = {}
    for run in runs:
        for entry in run.evaluations[-1:]:
            for metric in list_metrics(entry, sys.maxsize):
                if metric.name not in LOGGED:
                    metrics.setdefault(metric.name, metric)
    return list(metrics.values())


def _split_by_images(
    runs: Sequence[Run], chart: Chart, key: str, read_training: Reader | None = None
) -> list[Chart]:
    """Return a chart of a metric of all runs, or one for each set of training images and each set
    of validation images that some runs share: other images have other losses."""
    readers = (read_training or partial(_read_training, key), partial(_read_evaluations, key))
    groups = [group_runs(runs, "train"), group_runs(runs, "val")]
    if max(map(len, groups)) < 2:
        return [replace(chart, curves=_build_curves(runs, *readers))]
    charts: list[Chart] = []
    for read, kind, sets in zip(readers, ("training", "validation"), groups, strict=True):
        for group in sets:
            curves = [curve for curve in _build_curves(runs, read) if curve.run in group]
            title = f"{chart.title}, {kind}: {name_group(runs, group)}"
            name = f"{chart.name}-{len(charts) + 1}"
            charts.append(replace(chart, name=name, title=title, curves=curves))
    return charts


def thin_curve(
    steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS
) -> tuple[list[int], list[float | None]]:
    """Return at most `most` points: means of groups of neighbours, at the last step of each. Few
    points stay as they are."""
    size = -(-len(steps) // most)
    if size > 1:
        first = np.arange(0, len(steps), size)
        counts = np.diff([*first, len(steps)])
        values = np.add.reduceat(values, first) / counts
        steps = steps[first + counts - 1]
    return steps.tolist(), np.where(np.isfinite(values), values, np.array(None)).tolist()


def _build_curves(runs: Sequence[Run], *readers: Reader) -> list[Curve]:
    curves = []
    for read in readers:
        for number, run in enumerate(runs):
            for kind, points in read(run).items():
                if points:
                    curves.append(Curve(number, kind, *thin_curve(*_split_points(points))))
    return curves


def _split_points(points: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps, int64, and the values, float64, of points."""
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps.astype(np.int64), values


def _read_losses(run: Run) -> Points:
    """Return the training loss of every logged step."""
    losses: list[tuple[int, float]] = []
    for entry in run.training:
        losses += enumerate(entry["losses"], entry["first_step"] + 1)
    return {"training": losses}


def _read_training(key: str, run: Run) -> Points:
    return {"training": _read_entries(key, run.training)}


def _read_speeds(key: str, factor: float, run: Run) -> Points:
    """Return a speed figure of every interval. Profiled steps are left out."""
    entries = [entry for entry in run.training if "traced" not in entry]
    return {"training": [(step, factor * speed) for step, speed in _read_entries(key, entries)]}


def _read_evaluations(key: str, run: Run) -> Points:
    points: Points = {"validation": [], "moving average": []}
    for entry in run.evaluations:
        kind: Kind = "moving average" if entry["weights"] == "ema" else "validation"
        points[kind] += _read_entries(key, [entry])
    return points


def _read_entries(key: str, entries: Sequence[Any]) -> list[tuple[int, float]]:
    return [(entry["step"], entry[key]) for entry in entries if key in entry]


def _read_scales(run: Run) -> Points:
    """Return the loss scales of a run; nothing if all are 1."""
    scales = [(entry["step"], entry["loss_scale"]) for entry in run.training]
    return {} if set(dict(scales).values()) == {1} else {"training": scales}


def _compare_losses(runs: Sequence[Run]) -> list[Curve]:
    """Return how far the loss of every step is from the first run's, relative to it, for runs on
    its training images and steps that both have."""
    groups = group_runs(runs, "train")
    if not groups or groups[0][0] != 0:
        return []
    steps, expected = _split_points(_read_losses(runs[0])["training"])
    curves = []
    for number in groups[0][1:]:
        own_steps, losses = _split_points(_read_losses(runs[number])["training"])
        common, left, right = np.intersect1d(steps, own_steps, return_indices=True)
        with np.errstate(all="ignore"):
            differences = np.abs(losses[right] / expected[left] - 1)
        if len(common):
            curves.append(Curve(number, "training", *thin_curve(common, differences)))
    return curves
