"""Write a benchmark report as one page of HTML: its roofline, its cells and where they were
measured."""

import io
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lockstep.benchmark.failures import OK
from lockstep.benchmark.iteration_times import format_rate
from lockstep.benchmark.labels import collect_remarks, describe_kind, format_interval
from lockstep.benchmark.report_file import BenchmarkReport, find_environment, read_benchmark
from lockstep.benchmark.roofline_plot import draw_roofline, share_of_machine
from lockstep.system.errors import UserError
from lockstep.system.files import write_text
from lockstep.system.html import colours, data_address
from lockstep.system.plots import save
from lockstep.system.version import version

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
