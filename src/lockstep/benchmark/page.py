"""Write a benchmark report as one page of HTML: its roofline, its cells and where they were
measured."""

import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lockstep.benchmark.cells import TRAIN, name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.iteration_times import format_rate
from lockstep.benchmark.labels import collect_remarks, describe_kind, format_interval
from lockstep.benchmark.report_file import BenchmarkReport, find_environment, read_benchmark
from lockstep.system.errors import UserError
from lockstep.system.files import write_text
from lockstep.system.html import colours, data_address
from lockstep.system.plots import save
from lockstep.system.version import version

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SHOWN = ("processor", "device", "lockstep", "python")
"""What a page shows of an environment, besides the framework's version."""


def write_page(report: Path, out: Path, plots: Path | None = None) -> list[Path]:
    """Write the page of a report. With `plots`, the roofline is also written there, as PNG and SVG,
    if there is one. Return the files.

    Raises `DataError` if the file is no report, and `UserError` if the page cannot be written.
    """
    content = read_benchmark(report)
    figure = draw_roofline(content)
    try:
        write_text(out, render(content, _encode(figure)))
        if plots is not None and figure is not None:
            plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    written = [out]
    if plots is not None and figure is not None:
        written += [plots / "roofline.png", plots / "roofline.svg"]
        for picture in written[1:]:
            save(figure, picture)
    return written


def render(report: BenchmarkReport, roofline: str) -> str:
    """Return the page. `roofline` is a picture as a `data:` address, or empty."""
    source = (files("lockstep.benchmark") / "templates/benchmark.html.j2").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    measured = [cell for cell in report["cells"] if cell["status"] == OK]
    backends = list(dict.fromkeys(cell["backend"] for cell in report["cells"]))
    return environment.from_string(source).render(
        command=report["command"],
        tables={
            what: [_describe_cell(report, cell) for cell in measured if cell["what"] == what]
            for what in dict.fromkeys(cell["what"] for cell in measured)
        },
        remarks=collect_remarks(report["cells"]),
        environments=[(name, _describe_environment(report, name)) for name in backends],
        roofline=roofline,
        style=Markup(colours()),
        lockstep_version=version(),
    )


def _describe_cell(report: BenchmarkReport, cell: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: what is measured, ranks, batch, rate, interval, latency, share of
    the machine's limit and what bounds it."""
    share = share_of_machine(report, cell)
    return [
        describe_kind(cell),
        str(cell["ranks"]),
        str(cell["batch"]),
        format_rate(cell["images_per_sec"]),
        format_interval(cell),
        f"{cell['latency_ms']['p50']:.1f}",
        f"{cell['latency_ms']['p99']:.1f}",
        "\N{EN DASH}" if share is None else f"{share:.0%}",
        str(cell["bound_by"]),
    ]


def _describe_environment(report: BenchmarkReport, backend: str) -> str:
    environment = find_environment(report, backend)
    names = [name for name in (backend, *_SHOWN) if environment.get(name)]
    return ", ".join(f"{name} {environment[name]}" for name in names)


def _encode(figure: Any) -> str:
    """Return a figure as a `data:` address; empty if there is none."""
    if figure is None:
        return ""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return data_address("image/svg+xml", file.getvalue())


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
        is_half = cell["dtype"] in ("bf16", "fp16")  # fewer bytes: its label has room to the right
        place = (intensity * (1.06 if is_half else 1 / 1.06), height)
        axes.annotate(text, place, fontsize=8, va="center", ha="left" if is_half else "right")


def _finish(axes: "Axes", lowest: float, highest: float) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte moved",
        ylabel="billion operations per second",
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
