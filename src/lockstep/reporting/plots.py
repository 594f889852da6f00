"""Write the figures of a report as files, for papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.reporting.curves import Chart, charts
from lockstep.reporting.views import Matrix, View, views
from lockstep.runs.reading import Run
from lockstep.system.errors import UserError
from lockstep.system.plotting import over_steps, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_STYLES = {"training": "o-", "validation": "o-", "moving average": "s--"}
_MOST_NUMBERS = 25
"""A confusion matrix shows numbers and class names if it has at most this many rows."""


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every figure as PNG and SVG into a folder, which is created if it is missing. Return
    the files.

    Raises `UserError` if they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write plots into {folder}: {error.strerror}; choose another folder"
        ) from None
    figures = {chart.name: _of_chart(chart, runs) for chart in charts(runs)}
    for view in views(runs):
        name = f"{runs[view.run].name}-{view.weights}".replace("/", "-")
        if view.matrix is not None:
            figures[f"confusion-{name}"] = _of_matrix(view.matrix, runs[view.run].name)
            figures[f"reliability-{name}"] = _of_bins(view, runs[view.run].name)
    files = [
        (folder / f"{name}.{suffix}", figure)
        for name, figure in figures.items()
        for suffix in FORMATS
    ]
    for path, figure in files:
        save(figure, path)
    return [path for path, _ in files]


def _of_chart(chart: Chart, runs: Sequence[Run]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    names = []
    for number, curve in enumerate(chart.curves):
        names.append(
            plain(runs[curve.run].name) + ("" if curve.kind == "training" else f", {curve.kind}")
        )
        values = np.array(curve.values, np.float64)  # None becomes NaN, a gap
        alone = curve.kind == "training"
        shown = np.isfinite(np.pad(values, 1, constant_values=np.nan))
        # A line needs two points: a point without neighbours gets a mark.
        isolated = np.flatnonzero(shown[1:-1] & ~shown[:-2] & ~shown[2:])
        axes.plot(
            curve.steps,
            values,
            _STYLES[curve.kind],
            color=f"C{curve.run}",
            label=str(number),
            linewidth=1 if alone else 1.6,
            alpha=0.6 if alone else 1,
            markersize=4,
            markevery=isolated.tolist() if alone else None,
        )
    axes.set(
        title=chart.title,
        xlabel="step",
        ylabel=chart.unit.strip(),
        yscale="log" if chart.logarithmic else "linear",
    )
    over_steps([axes])
    _keep_to_what_can_be(axes, chart)
    legend = axes.get_legend()
    assert legend is not None
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)  # not as the label: matplotlib hides labels that begin with "_"
    return figure


def _keep_to_what_can_be(axes: "Axes", chart: Chart) -> None:
    """Leave no room below 0 for values that are never negative, or above 100 % for shares."""
    found = [value for curve in chart.curves for value in curve.values if value is not None]
    low, high = axes.get_ylim()
    if found and not chart.logarithmic:
        low = max(low, 0.0) if min(found) >= 0 else low
        high = min(high, 100.0) if chart.unit == " %" and max(found) <= 100 else high
        axes.set_ylim(low, high)


def _of_matrix(matrix: Matrix, name: str) -> "Figure":
    from matplotlib.figure import Figure

    count = len(matrix.names)
    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    cells = np.array(matrix.cells)
    shares = cells / np.maximum(np.array(matrix.images), 1)[:, None]
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, label="share of the class")
    axes.set(title=f"Confusion, {plain(name)}", xlabel="taken for", ylabel="class")
    if count <= _MOST_NUMBERS and matrix.group_classes == 1:
        names = [plain(each) for each in matrix.names]
        axes.set_xticks(range(count), names, rotation=60, ha="right")
        axes.set_yticks(range(count), names)
        for row, column in zip(*np.nonzero(cells), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(
                column,
                row,
                str(cells[row, column]),
                ha="center",
                va="center",
                color=colour,
                fontsize=7,
            )
    return figure


def _of_bins(view: View, name: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    filled = [each for each in view.bins if each.images]
    middles = [(each.low + each.high) / 2 for each in filled]
    width = view.bins[0].high - view.bins[0].low
    axes.bar(middles, [each.accuracy for each in filled], width=0.9 * width, label="accuracy")
    axes.plot(
        [each.confidence for each in filled],
        [each.accuracy for each in filled],
        "o",
        color="black",
        markersize=3,
    )
    axes.plot([0, 1], [0, 1], "--", color="0.5")
    error = view.calibration_error
    axes.set(
        title=f"Reliability, {plain(name)}"
        + ("" if error is None else f" (ECE {100 * error:.2f} %)"),
        xlabel="confidence",
        ylabel="accuracy",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
