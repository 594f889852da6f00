"""Turn the log of a run into curves over steps, thinned to what a plot can show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.runs.reading import Run

MOST_POINTS = 1500
"""A curve is thinned to at most this many points; a plot is about 1000 pixels wide."""

Kind = Literal["training", "validation", "moving average"]


@dataclass(frozen=True)
class Curve:
    """Values of a run over steps. None stands for NaN and infinity."""

    run: int
    """Number of the run on the page."""
    kind: Kind
    steps: list[int]
    """Optimizer steps done when the value was found."""
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


Of = Callable[[int, Run], list[Curve]]
"""The curves of one run, given its number on the page."""

_DIFFERENCE = "Training loss: relative difference from the first run"
_EQUAL = "No difference in these steps."


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the plots of some runs: loss, accuracy, learning rate, throughput, data wait, and
    others if there is data."""
    found = [
        Chart("loss", "Loss", "", [*_each(runs, _losses), *_each(runs, _evaluated("loss"))]),
        Chart(
            "accuracy",
            "Top-1 accuracy",
            " %",
            [*_each(runs, _logged("top1_percent")), *_each(runs, _evaluated("top1_percent"))],
        ),
        Chart("difference", _DIFFERENCE, "", _differences(runs), logarithmic=True, note=_EQUAL),
        Chart("lr", "Learning rate", "", _each(runs, _logged("lr"))),
        Chart(
            "throughput", "Training throughput", " images/s", _each(runs, _timed("images_per_sec"))
        ),
        Chart("wait", "Waiting for data", " %", _each(runs, _timed("data_wait_share", 100))),
        Chart("scale", "Loss scale", "", _each(runs, _scales), logarithmic=True),
    ]
    return [chart for chart in found if chart.curves]


def thinned(
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
    return steps.tolist(), [value if np.isfinite(value) else None for value in values.tolist()]


def step_losses(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the training loss of every logged step: steps done, int64, and losses, float64."""
    losses = [
        (entry["first_step"] + i + 1, loss)
        for entry in run.training
        for i, loss in enumerate(entry["losses"])
    ]
    return np.array([step for step, _ in losses], np.int64), np.array(
        [loss for _, loss in losses], np.float64
    )


def _curve(number: int, kind: Kind, points: Sequence[tuple[int, float]]) -> list[Curve]:
    if not points:
        return []
    steps, values = (np.array(column) for column in zip(*points, strict=True))
    return [Curve(number, kind, *thinned(steps, values.astype(np.float64)))]


def _each(runs: Sequence[Run], of: Of) -> list[Curve]:
    return [curve for number, run in enumerate(runs) for curve in of(number, run)]


def _losses(number: int, run: Run) -> list[Curve]:
    steps, losses = step_losses(run)
    return [Curve(number, "training", *thinned(steps, losses))] if len(steps) else []


def _logged(field: Literal["top1_percent", "lr"]) -> Of:
    return lambda number, run: _curve(
        number,
        "training",
        [(entry["step"], entry[field]) for entry in run.training if field in entry],
    )


def _timed(field: Literal["images_per_sec", "data_wait_share"], factor: float = 1) -> Of:
    """Return the curves of a speed figure. Profiled steps are left out."""
    return lambda number, run: _curve(
        number,
        "training",
        [(entry["step"], factor * entry[field]) for entry in run.training if "traced" not in entry],
    )


def _evaluated(field: Literal["loss", "top1_percent"]) -> Of:
    kinds: dict[str, Kind] = {"trained": "validation", "ema": "moving average"}
    return lambda number, run: [
        curve
        for weights, kind in kinds.items()
        for curve in _curve(
            number,
            kind,
            [(e["step"], e[field]) for e in run.evaluations if e["weights"] == weights],
        )
    ]


def _scales(number: int, run: Run) -> list[Curve]:
    points = [(entry["step"], entry["loss_scale"]) for entry in run.training]
    return _curve(number, "training", points) if any(scale != 1 for _, scale in points) else []


def _differences(runs: Sequence[Run]) -> list[Curve]:
    """Return how far the loss of every step is from the first run's, relative to it, for steps that
    both have."""
    if len(runs) < 2:
        return []
    steps, expected = step_losses(runs[0])
    found = []
    for number, run in enumerate(runs[1:], start=1):
        own_steps, losses = step_losses(run)
        common, left, right = np.intersect1d(steps, own_steps, return_indices=True)
        with np.errstate(all="ignore"):
            differences = np.abs(losses[right] / expected[left] - 1)
        if len(common):
            found.append(Curve(number, "training", *thinned(common, differences)))
    return found
