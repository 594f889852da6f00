"""Write runs and benchmark reports in the formats of other programs, for tools that read those.

The figures are Lockstep's. What a run can also write while it trains is in `lockstep.runs`.
"""

import csv
import io
from collections.abc import Callable
from itertools import product
from pathlib import Path

from lockstep.backends import FRAMEWORKS
from lockstep.benchmark.report_file import BenchmarkReport, read_benchmark
from lockstep.runs.loggers import dlll, nvidia_report
from lockstep.runs.reading import LoggedRun, read_epochs
from lockstep.system.errors import DataError, UserError, nearest
from lockstep.system.strict_json import to_json


def convert(source: Path, form: str) -> str:
    """Return a run's folder or a benchmark report in one of `FORMS`. Raises `UserError` if that is
    impossible."""
    if form not in FORMS:
        raise UserError(f"there is no form {form!r}. {nearest(form, FORMS)}")
    format_run, format_report = FORMS[form]
    if source.is_dir():
        if format_run is None:
            raise UserError(f"{form} is made from a benchmark report; {source} is a folder")
        return format_run(read_epochs(source))
    if format_report is None:
        raise UserError(f"{form} is made from a run's folder; {source} is not a folder")
    return format_report(read_benchmark(source) | {"written_at": source.stat().st_mtime})


def format_nvidia(report: BenchmarkReport) -> str:
    """Return the JSON that NVIDIA's MXNet example writes for its grid (benchmark.py -o): images/s
    by GPUs and batch.

    The format has one backend, runtime, model, precision, layout and kind of data. A report with
    several is refused. A cell that failed has no value.
    """
    for name in ("backend", "runtime", "model", "dtype", "data", "compile", "layout"):
        values = sorted({str(cell[name]) for cell in report["cells"] if name in cell})
        if len(values) > 1:
            raise DataError(
                f"the format has one {name}, the report has {', '.join(values)}; measure each into"
                " a separate report"
            )
    keys = {"train": "train.total_ips", "inference": "val.total_ips"}
    ranks = list(dict.fromkeys(cell["ranks"] for cell in report["cells"]))
    batches = list(dict.fromkeys(cell["batch"] for cell in report["cells"]))
    whats = {cell["what"] for cell in report["cells"]}
    measured = [key for what, key in keys.items() if what in whats]
    metrics: dict[str, dict[str, dict[str, float]]] = {}
    for count, batch in product(ranks, batches):
        metrics.setdefault(str(count), {})[str(batch)] = {}
    for cell in report["cells"]:
        if cell["status"] == "ok":
            entry = metrics[str(cell["ranks"])][str(cell["batch"])]
            entry[keys[cell["what"]]] = cell["images_per_sec"]
    form = {"model": "", "ngpus": ranks, "bs": batches, "metric_keys": measured, "metrics": metrics}
    return to_json(form, indent=4)


def format_dllogger(report: BenchmarkReport) -> str:
    """Return a benchmark's cells as `DLLL {json}` lines (`lockstep.runs.loggers.dlll`): for each
    measured cell a line of parameters and the summary ([]).

    `report["written_at"]` is the time at which the report was written, in seconds since 1970.
    """
    measured = [cell for cell in report["cells"] if cell["status"] == "ok"]
    began = report["written_at"] - sum(sum(cell["times_sec"]) for cell in measured)
    elapsed = 0.0
    lines = []
    for cell in measured:
        keys = dlll.KEYS[FRAMEWORKS[cell["backend"]].nvidia_example]
        chosen = keys.trained if cell["what"] == "train" else keys.inferred
        parameters = {name: cell[name] for name in _PARAMETERS}
        header = [
            *dlll.describe_units(chosen),
            dlll.make_line("PARAMETER", parameters),
        ]
        lines += [dlll.format_line(content, began, elapsed) for content in header]
        elapsed += sum(cell["times_sec"])
        figures = dlll.rename_figures(chosen, cell["latency_ms"] | cell)
        lines.append(dlll.format_line(dlll.make_line([], figures), began, elapsed))
    return "".join(lines)


_PARAMETERS = ("what", "backend", "runtime", "model", "dtype", "batch", "ranks", "data")


def format_timm(run: LoggedRun) -> str:
    """Return timm's `summary.csv`: a row for each epoch, from 0, with the learning rate of its last
    step.

    As in timm, evaluations are those of the moving average if there is one. Columns of an epoch
    without evaluation are empty.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"])
    for epoch in run.epochs:
        result = epoch.evaluations.get("ema") or epoch.evaluations.get("trained")
        scores: list[object] = ["", "", ""]
        if result:
            scores = [result["loss"], result["top1_percent"], result["top5_percent"]]
        rows.writerow([epoch.number, epoch.mean("loss"), *scores, epoch.lr])
    return text.getvalue()


FORMS: dict[
    str, tuple[Callable[[LoggedRun], str] | None, Callable[[BenchmarkReport], str] | None]
] = {
    "nvidia-report": (nvidia_report.format_run, None),
    "nvidia-benchmark": (None, format_nvidia),
    "dlll": (dlll.format_run, format_dllogger),
    "timm": (format_timm, None),
}
"""By name: the functions that write a run and a benchmark report; None if the format does not have
it."""
