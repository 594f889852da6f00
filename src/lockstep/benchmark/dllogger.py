"""Write a benchmark report as `DLLL {json}` lines; see `lockstep.runs.dlll`."""

from lockstep.backends import FRAMEWORKS
from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.runs.dlll import KEYS, describe_units, format_line, make_line, rename_figures


def of_benchmark(report: BenchmarkReport) -> str:
    """Return a benchmark's cells as lines: for each measured cell a line of parameters and the
    summary ([]).

    `report["written_at"]` is the time at which the report was written, in seconds since 1970.
    """
    measured = [cell for cell in report["cells"] if cell["status"] == "ok"]
    began = report["written_at"] - sum(sum(cell["times_sec"]) for cell in measured)
    elapsed = 0.0
    lines = []
    for cell in measured:
        keys = KEYS[FRAMEWORKS[cell["backend"]].nvidia_example]
        chosen = keys.trained if cell["what"] == "train" else keys.inferred
        parameters = {
            name: cell[name]
            for name in ("what", "backend", "runtime", "model", "dtype", "batch", "ranks", "data")
        }
        header = [*describe_units(chosen), make_line("PARAMETER", parameters)]
        lines += [format_line(content, began, elapsed) for content in header]
        elapsed += sum(cell["times_sec"])
        lines.append(
            format_line(
                make_line([], rename_figures(chosen, cell["latency_ms"] | cell)), began, elapsed
            )
        )
    return "".join(lines)
