"""Write runs and benchmark reports in the formats of other programs, for tools that read those.

The figures are Lockstep's. A log has the times of intervals, not of single steps. Therefore all steps of an epoch count
here, while MXNet's example leaves out the first iteration of an epoch.
"""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path

from lockstep.benchmark import dllogger
from lockstep.benchmark.epochs import Epoch, LoggedRun, images_of, read_epochs
from lockstep.benchmark.report_file import BenchmarkReport, read_benchmark
from lockstep.system.errors import DataError, UserError, nearest
from lockstep.system.event_log import TrainEvent, seconds_of
from lockstep.system.strict_json import to_json


def converted(source: Path, form: str) -> str:
    """Return a run's folder or a benchmark report in one of `FORMS`. Raises `UserError` if that is impossible."""
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


def nvidia_report(run: LoggedRun) -> str:
    """Return the JSON of `--report FILE` in NVIDIA's MXNet example of 2019 (report.py).

    Metrics are lists by epoch; accuracies are in percent. `time` is the mean of an iteration in seconds. A metric that was
    not measured in every epoch has fewer values. Profiled steps have no speed.
    """
    metrics: dict[str, list[float]] = {}
    for epoch in run.epochs:
        for name, value in (_trained(epoch) | _evaluated(epoch, run.recipe.global_batch_images)).items():
            metrics.setdefault(name, []).append(value)
    report = {
        "model": run.recipe.fields()["model"],
        "ngpus": run.environment["ranks"],
        "total_duration": run.seconds,
        "cmd": run.environment.get("command", []),
        "metrics": metrics,
    }
    return to_json(report, indent=4)


def _trained(epoch: Epoch) -> dict[str, float]:
    return {
        "train.top1": epoch.mean("top1_percent"),
        "train.top5": epoch.mean("top5_percent"),
        "train.loss": epoch.mean("loss"),
    } | _timed(epoch.timed)


def _timed(intervals: tuple[TrainEvent, ...]) -> dict[str, float]:
    if not intervals:
        return {}
    seconds = sum(seconds_of(entry) for entry in intervals)
    steps = sum(entry["step"] - entry["first_step"] for entry in intervals)
    return {"train.time": seconds / steps, "train.total_ips": images_of(intervals) / seconds}


def _evaluated(epoch: Epoch, batch_images: int) -> dict[str, float]:
    entry = epoch.evaluations.get("trained")
    if entry is None:
        return {}
    return {
        "val.top1": entry["top1_percent"],
        "val.top5": entry["top5_percent"],
        "val.loss": entry["loss"],
        "val.time": seconds_of(entry) / math.ceil(entry["images"] / batch_images),
        "val.total_ips": entry["images_per_sec"],
    }


def nvidia_benchmark(report: BenchmarkReport) -> str:
    """Return the JSON that NVIDIA's MXNet example writes for its grid (benchmark.py -o): images/s by GPUs and batch.

    The format has one engine, model, precision, layout and kind of data. A report with several is refused. A cell that
    failed has no value.
    """
    for name in ("backend", "model", "dtype", "data", "compile", "layout"):
        found = sorted({str(cell[name]) for cell in report["cells"] if name in cell})
        if len(found) > 1:
            raise DataError(
                f"the format has one {name}, the report has {', '.join(found)}; measure each into a separate report"
            )
    keys = {"train": "train.total_ips", "inference": "val.total_ips"}
    ranks = list(dict.fromkeys(cell["ranks"] for cell in report["cells"]))
    batches = list(dict.fromkeys(cell["batch"] for cell in report["cells"]))
    metrics: dict[str, dict[str, dict[str, float]]] = {str(n): {str(b): {} for b in batches} for n in ranks}
    for cell in report["cells"]:
        if cell["status"] == "ok":
            metrics[str(cell["ranks"])][str(cell["batch"])][keys[cell["what"]]] = cell["images_per_sec"]
    measured = [key for what, key in keys.items() if any(cell["what"] == what for cell in report["cells"])]
    form = {"model": "", "ngpus": ranks, "bs": batches, "metric_keys": measured, "metrics": metrics}
    return to_json(form, indent=4)


def timm_summary(run: LoggedRun) -> str:
    """Return timm's `summary.csv`: a row for each epoch, from 0, with the learning rate of its last step.

    As in timm, evaluations are those of the moving average if there is one. Columns of an epoch without evaluation are
    empty.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"])
    for epoch in run.epochs:
        found = epoch.evaluations.get("ema") or epoch.evaluations.get("trained")
        evaluated = [found["loss"], found["top1_percent"], found["top5_percent"]] if found else ["", "", ""]
        rows.writerow([epoch.number, epoch.mean("loss"), *evaluated, epoch.lr])
    return text.getvalue()


FORMS: dict[str, tuple[Callable[[LoggedRun], str] | None, Callable[[BenchmarkReport], str] | None]] = {
    "nvidia-report": (nvidia_report, None),
    "nvidia-benchmark": (None, nvidia_benchmark),
    "dlll": (dllogger.of_run, dllogger.of_benchmark),
    "timm": (timm_summary, None),
}
"""By name: the functions that write a run and a benchmark report; None if the format does not have it."""
