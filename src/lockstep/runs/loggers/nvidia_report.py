"""The JSON document of `--report FILE` in NVIDIA's MXNet example of 2019 (report.py): of a run's
log, and in a file while a run trains.

Metrics are lists by epoch; accuracies are in percent. `time` is the mean of an iteration in
seconds. A metric that was not measured in every epoch has fewer values. Profiled steps have no
speed. A log has the times of intervals, not of single steps. Therefore all steps of an epoch count
here, while the example leaves out the first iteration of an epoch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.runs.loggers import Logger, Opening
from lockstep.runs.reading import Epoch, LoggedRun, count_images, count_steps, sum_process_seconds
from lockstep.system.errors import UserError
from lockstep.system.event_log import (
    EvaluateEvent,
    LogEvent,
    StartEvent,
    TrainEvent,
    compute_seconds,
)
from lockstep.system.files import write_text
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import parsed, to_json


def format_run(run: LoggedRun) -> str:
    """Return the document of a run."""
    metrics = [compute_metrics(epoch, run.recipe.global_batch_images) for epoch in run.epochs]
    about = run.environment
    return format_document(
        run.recipe.fields()["model"], about["ranks"], run.seconds, about.get("command", []), metrics
    )


def format_document(
    model: Any,
    ranks: int,
    seconds: float,
    command: Sequence[str],
    epochs: Iterable[dict[str, float]],
) -> str:
    """Return a document. `seconds` is the time of all processes; `epochs` are the metrics of every
    epoch, in order."""
    metrics: dict[str, list[float]] = {}
    for epoch in epochs:
        for name, value in epoch.items():
            metrics.setdefault(name, []).append(value)
    report = {
        "model": model,
        "ngpus": ranks,
        "total_duration": seconds,
        "cmd": command,
        "metrics": metrics,
    }
    return to_json(report, indent=4)


def compute_metrics(epoch: Epoch, batch_images: int) -> dict[str, float]:
    """Return the metrics of an epoch, as far as it was trained and evaluated. `batch_images` are
    the images of a step."""
    metrics = {
        "train.top1": epoch.mean("top1_percent"),
        "train.top5": epoch.mean("top5_percent"),
        "train.loss": epoch.mean("loss"),
    }
    intervals = epoch.timed_intervals
    if intervals:
        seconds = sum(map(compute_seconds, intervals))
        metrics["train.time"] = seconds / count_steps(intervals)
        metrics["train.total_ips"] = count_images(intervals) / seconds
    entry = epoch.evaluations.get("trained")
    if entry is not None:
        batches = math.ceil(entry["images"] / batch_images)
        metrics["val.top1"] = entry["top1_percent"]
        metrics["val.top5"] = entry["top5_percent"]
        metrics["val.loss"] = entry["loss"]
        metrics["val.time"] = compute_seconds(entry) / batches
        metrics["val.total_ips"] = entry["images_per_sec"]
    return metrics


class NvidiaReport(Logger):
    """Writes the report while a run trains: as in the example, again after every epoch of training
    and after every evaluation. A reader never sees a part of it."""

    key = "nvidia-report"

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._path = opening.folder / "nvidia-report.json"
        self._per_epoch = 1
        self._command: list[str] = []
        self._seconds_before = 0.0
        self._metrics: dict[int, dict[str, float]] = {}
        self._intervals: list[TrainEvent] = []
        self._evaluations: dict[str, EvaluateEvent] = {}

    def entry(self, entry: LogEvent) -> None:
        """Take an entry, and write the file at the end of an epoch."""
        if entry["kind"] == "start":
            self._begin(entry)
        elif self._take(entry):
            text = format_document(
                self._opening.about["model"],
                self._opening.about["ranks"],
                self._seconds_before + entry["elapsed_sec"],
                self._command,
                [self._metrics[number] for number in sorted(self._metrics)],
            )
            write_text(self._path, text)

    def _begin(self, start: StartEvent) -> None:
        environment = start["environment"]
        self._path = Path(environment["execution"]["nvidia_report_file"] or self._path)
        _check(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._per_epoch = start["steps_per_epoch"]
        self._command = environment["command"]
        self._seconds_before = sum_process_seconds(self._opening.log)
        for entry in self._opening.log:
            self._take(entry)
        self._opening = replace(self._opening, log=())  # a long run has many entries

    def _take(self, entry: LogEvent) -> bool:
        """Keep the figures of an entry, and return whether it ends an epoch's training or
        evaluation."""
        if entry["kind"] == "train":
            if entry["first_step"] % self._per_epoch == 0:
                self._intervals = []
                self._evaluations = {}
            self._intervals.append(entry)
        elif entry["kind"] == "evaluate":
            self._evaluations[entry["weights"]] = entry
        else:
            return False
        if not self._intervals or entry["step"] % self._per_epoch:
            return False
        epoch = Epoch(
            entry["step"] // self._per_epoch - 1, tuple(self._intervals), self._evaluations
        )
        self._metrics[epoch.number] = compute_metrics(
            epoch, self._opening.about["global_batch_images"]
        )
        return True


open_logger = NvidiaReport


def _check(path: Path) -> None:
    """Raise `UserError` if a file is not such a report, so that no other file is ever replaced."""
    try:
        text = read_regular(path, TEXT) if path.exists() else b""
        there: Any = parsed(text or b'{"metrics": {}}')
    except ValueError:
        there = None
    if not isinstance(there, dict) or "metrics" not in there:
        raise UserError(
            f"{path} is not NVIDIA's report; remove it, or use a different file: --set"
            " nvidia_report_file=FILE"
        )
