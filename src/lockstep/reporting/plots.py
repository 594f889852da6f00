"""Write the figures of a report as files, for papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.reporting.curves import Chart, build_charts
from lockstep.reporting.views import Matrix, View, build_views
from lockstep.runs.reading import Run
from lockstep.system.errors import UserError
from lockstep.system.plots import list_families, over_steps, plain, save

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
    figures = {chart.name: _draw_chart(chart, runs) for chart in build_charts(runs)}
    for view in build_views(runs):
        kind = f"{view.weights}-{view.step}" if runs[view.run].best_results else view.weights
        name = f"{runs[view.run].name}-{kind}".replace("/", "-")
        if view.matrix is not None:
            figures[f"confusion-{name}"] = _draw_matrix(view.matrix, runs[view.run].name)
            figures[f"reliability-{name}"] = _draw_reliability(view, runs[view.run].name)
    files = []
    for name, figure in figures.items():
        for suffix in FORMATS:
            files.append(folder / f"{name}.{suffix}")
            save(figure, files[-1])
    return files


def _draw_chart(chart: Chart, runs: Sequence[Run]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    names = []
    for number, curve in enumerate(chart.curves):
        name = plain(runs[curve.run].name)
        values = np.array(curve.values, np.float64)  # None becomes NaN, a gap
        shown = np.isfinite(np.pad(values, 1, constant_values=np.nan))
        # A line needs two points: a point without neighbours gets a mark.
        isolated = np.flatnonzero(shown[1:-1] & ~shown[:-2] & ~shown[2:])
        style: dict[str, Any] = {"linewidth": 1, "alpha": 0.6, "markevery": isolated.tolist()}
        if curve.kind != "training":
            name = f"{name}, {curve.kind}"
            style = {"linewidth": 1.6}
        names.append(name)
        style |= {"color": f"C{curve.run}", "label": str(number), "markersize": 4}
        axes.plot(curve.steps, values, _STYLES[curve.kind], **style)
    axes.set(
        title=plain(chart.title),
        xlabel="step",
        ylabel=chart.unit.strip(),
        yscale="log" if chart.logarithmic else "linear",
    )
    over_steps([axes])
    _limit_axis(axes, chart)
    legend = axes.get_legend()
    assert legend is not None
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)  # not as the label: matplotlib hides labels that begin with "_"
    return figure


def _limit_axis(axes: "Axes", chart: Chart) -> None:
    """Leave no room below 0 for values that are never negative, or above 100 % for shares."""
    values = [value for curve in chart.curves for value in curve.values if value is not None]
    low, high = axes.get_ylim()
    if not values or chart.logarithmic:
        return
    if min(values) >= 0:
        low = max(low, 0.0)
    if chart.unit == " %" and max(values) <= 100:
        high = min(high, 100.0)
    axes.set_ylim(low, high)


def _draw_matrix(matrix: Matrix, name: str) -> "Figure":
    from matplotlib.figure import Figure

    count = len(matrix.names)
    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    cells = np.array(matrix.cells)
    shares = cells / np.maximum(np.array(matrix.images), 1)[:, None]
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, label="share of the class")
    axes.set(title=f"Confusion, {plain(name)}", xlabel="predicted class", ylabel="class")
    if count <= _MOST_NUMBERS and matrix.group_classes == 1:
        names = list(map(plain, matrix.names))
        families = list_families(names)
        axes.set_xticks(range(count), names, rotation=60, ha="right", fontfamily=families)
        axes.set_yticks(range(count), names, fontfamily=families)
        for row, column in zip(*np.nonzero(cells), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(column, row, str(cells[row, column]), color=colour, **style)
    return figure


def _draw_reliability(view: View, name: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    width = view.bins[0].high - view.bins[0].low
    for group in view.bins:
        if group.images:
            middle = (group.low + group.high) / 2
            accuracy = group.right / group.images
            axes.bar(middle, accuracy, width=0.9 * width, color="C0")
            axes.plot(group.confidence, accuracy, "o", color="black", markersize=3)
    axes.plot([0, 1], [0, 1], "--", color="0.5")
    title = f"Reliability, {plain(name)}"
    if view.calibration_error is not None:
        title += f" (ECE {100 * view.calibration_error:.2f} %, {view.basis})"
    axes.set(title=title, xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
