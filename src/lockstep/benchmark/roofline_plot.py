"""A roofline as a picture: the limits of a machine, and the rates of a benchmark's cells below them
(Williams, Waterman, Patterson 2009)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.benchmark.cells import TRAIN, name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.report_file import BenchmarkReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"fp32": "#2459d6", "tf32": "#7a4fd6", "bf16": "#d6722b", "fp16": "#2b8a3e"}
_LINE = 1.09
"""Labels are at least this factor apart in height."""
Entry = Mapping[str, Any]


def share_of_machine(report: BenchmarkReport, cell: Entry) -> float | None:
    """Return a cell's rate over what the machine's fastest product and copy allow.

    None for a cell that has no place under a roof: one that is not of training on one rank, or
    where the rate of products in its precision, or of copies, is not known.
    """
    has_work = cell["status"] == OK and (cell.get("roofline") or {}).get("bytes_per_image")
    is_alone = (cell["what"], cell["ranks"]) == (TRAIN, 1)
    is_known = report["machine"].get("copy_gb_per_sec") and cell["dtype"] in _list_products(report)
    if not (has_work and is_alone and is_known):
        return None
    return count_operations(cell) / _find_limit(report, cell["dtype"], count_per_byte(cell))


def draw_roofline(report: BenchmarkReport) -> "Figure | None":
    """Draw operations a second over operations a byte; None if no cell has a place."""
    cells = [cell for cell in report["cells"] if share_of_machine(report, cell) is not None]
    if not cells:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    reached = list(map(count_per_byte, cells))
    intensities = np.geomspace(min(reached) / 12, max(reached) * 6, 200)
    for dtype in _list_products(report):
        roof = [_find_limit(report, dtype, intensity) for intensity in intensities]
        axes.plot(intensities, roof, color=_COLOURS[dtype], label=f"limit in {dtype}")
    _mark_cells(axes, report, cells)
    _finish(axes, min(map(count_operations, cells)), max(_list_products(report).values()))
    return figure


def _mark_cells(axes: "Axes", report: BenchmarkReport, cells: Sequence[Entry]) -> None:
    models = {cell["model"] for cell in cells}
    lowest: dict[float, float] = {}
    for cell in sorted(cells, key=count_operations, reverse=True):
        intensity = count_per_byte(cell)
        rate = count_operations(cell)
        axes.plot(intensity, rate, "o", color=_COLOURS[cell["dtype"]])
        height = min(rate, lowest.get(intensity, np.inf) / _LINE)
        lowest[intensity] = height
        name = name_computer(cell) + (f" {cell['model']}" if len(models) > 1 else "")
        text = f"{name}: {share_of_machine(report, cell):.0%} of the limit"
        is_half = cell["dtype"] in ("bf16", "fp16")  # fewer bytes: its label has place to the right
        place = (intensity * (1.06 if is_half else 1 / 1.06), height)
        axes.annotate(text, place, fontsize=8, va="center", ha="left" if is_half else "right")


def _finish(axes: "Axes", lowest: float, highest: float) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations for each byte that is moved",
        ylabel="billion operations a second",
        ylim=(lowest / 1.4, 2.4 * highest),
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(visible=True, which="both", color="#e6e9ed", linewidth=0.6)
    axes.legend(loc="upper left")


def count_operations(cell: Entry) -> float:
    """Return the billion operations that a cell does in a second."""
    return float(cell["images_per_sec"] * cell["roofline"]["gflop_per_image"])


def count_per_byte(cell: Entry) -> float:
    """Return the operations that a cell does for each byte that it moves."""
    roofline = cell["roofline"]
    return float(1e9 * roofline["gflop_per_image"] / roofline["bytes_per_image"])


def _list_products(report: BenchmarkReport) -> dict[str, float]:
    """Return the billion operations a second of the machine's fastest product, by precision."""
    products = report["machine"].get("gemm_gflops") or {}
    return {dtype: rate for dtype, rate in products.items() if rate and dtype in _COLOURS}


def _find_limit(report: BenchmarkReport, dtype: str, intensity: float) -> float:
    copied = report["machine"]["copy_gb_per_sec"] * intensity
    return float(min(_list_products(report)[dtype], copied))
