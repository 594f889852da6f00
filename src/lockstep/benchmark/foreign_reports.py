"""Write runs and benchmark reports in the formats of other programs, for tools that read those.

The figures are Lockstep's. What a run can also write while it trains is in `lockstep.runs`.
"""

import csv
import io
from collections.abc import Callable
from pathlib import Path

from lockstep.benchmark import dllogger
from lockstep.benchmark.report_file import BenchmarkReport, read_benchmark
from lockstep.runs import dlll, mxnet_report
from lockstep.runs.epochs import LoggedRun, read_epochs
from lockstep.system.errors import DataError, UserError, nearest
from lockstep.system.strict_json import to_json


def converted(source: Path, form: str) -> str:
    """Return a run's folder or a benchmark report in one of `FORMS`. Raises `UserError` if that is
    impossible."""
    if form not in FORMS:
        raise UserError(f"there is no form {form!r}. {nearest(form, FORMS)}")
    of_run, of_report = FORMS[form]
    if source.is_dir():
        if of_run is None:
            raise UserError(f"{form} is made from a benchmark report; {source} is a folder")
        return of_run(read_epochs(source))
    if of_report is None:
        raise UserError(f"{form} is made from a run's folder; {source} is not a folder")
    return of_report(read_benchmark(source) | {"written_at": source.stat().st_mtime})


def nvidia_benchmark(report: BenchmarkReport) -> str:
    """Return the JSON that NVIDIA's MXNet example writes for its grid (benchmark.py -o): images/s
    by GPUs and batch.

    The format has one backend, runtime, model, precision, layout and kind of data. A report with several is
    refused. A cell that failed has no value.
    """
    for name in ("backend", "runtime", "model", "dtype", "data", "compile", "layout"):
        found = sorted({str(cell[name]) for cell in report["cells"] if name in cell})
        if len(found) > 1:
            raise DataError(
                f"the format has one {name}, the report has {', '.join(found)}; measure each into a"
                " separate report"
            )
    keys = {"train": "train.total_ips", "inference": "val.total_ips"}
    ranks = list(dict.fromkeys(cell["ranks"] for cell in report["cells"]))
    batches = list(dict.fromkeys(cell["batch"] for cell in report["cells"]))
    metrics: dict[str, dict[str, dict[str, float]]] = {
        str(n): {str(b): {} for b in batches} for n in ranks
    }
    for cell in report["cells"]:
        if cell["status"] == "ok":
            metrics[str(cell["ranks"])][str(cell["batch"])][keys[cell["what"]]] = cell[
                "images_per_sec"
            ]
    measured = [
        key for what, key in keys.items() if any(cell["what"] == what for cell in report["cells"])
    ]
    form = {"model": "", "ngpus": ranks, "bs": batches, "metric_keys": measured, "metrics": metrics}
    return to_json(form, indent=4)


def timm_summary(run: LoggedRun) -> str:
    """Return timm's `summary.csv`: a row for each epoch, from 0, with the learning rate of its last
    step.

    As in timm, evaluations are those of the moving average if there is one. Columns of an epoch
    without evaluation are empty.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"])
    for epoch in run.epochs:
        found = epoch.evaluations.get("ema") or epoch.evaluations.get("trained")
        evaluated = (
            [found["loss"], found["top1_percent"], found["top5_percent"]] if found else ["", "", ""]
        )
        rows.writerow([epoch.number, epoch.mean("loss"), *evaluated, epoch.lr])
    return text.getvalue()


FORMS: dict[
    str, tuple[Callable[[LoggedRun], str] | None, Callable[[BenchmarkReport], str] | None]
] = {
    "nvidia-report": (mxnet_report.format_run, None),
    "nvidia-benchmark": (None, nvidia_benchmark),
    "dlll": (dlll.format_run, dllogger.of_benchmark),
    "timm": (timm_summary, None),
}
"""By name: the functions that write a run and a benchmark report; None if the format does not have
it."""
