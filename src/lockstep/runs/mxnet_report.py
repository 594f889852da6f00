"""The JSON document of `--report FILE` in NVIDIA's MXNet example of 2019 (report.py).

Metrics are lists by epoch; accuracies are in percent. `time` is the mean of an iteration in
seconds. A metric that was not measured in every epoch has fewer values. Profiled steps have no
speed. A log has the times of intervals, not of single steps. Therefore all steps of an epoch count
here, while the example leaves out the first iteration of an epoch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.runs.epochs import Epoch, LoggedRun, count_images
from lockstep.system.event_log import TrainEvent, compute_seconds
from lockstep.system.strict_json import to_json


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
    return _select_training(epoch) | _select_evaluation(epoch, batch_images)


def _select_training(epoch: Epoch) -> dict[str, float]:
    return {
        "train.top1": epoch.mean("top1_percent"),
        "train.top5": epoch.mean("top5_percent"),
        "train.loss": epoch.mean("loss"),
    } | _compute_speed(epoch.timed_intervals)


def _compute_speed(intervals: tuple[TrainEvent, ...]) -> dict[str, float]:
    if not intervals:
        return {}
    seconds = sum(compute_seconds(entry) for entry in intervals)
    steps = sum(entry["step"] - entry["first_step"] for entry in intervals)
    return {"train.time": seconds / steps, "train.total_ips": count_images(intervals) / seconds}


def _select_evaluation(epoch: Epoch, batch_images: int) -> dict[str, float]:
    entry = epoch.evaluations.get("trained")
    if entry is None:
        return {}
    return {
        "val.top1": entry["top1_percent"],
        "val.top5": entry["top5_percent"],
        "val.loss": entry["loss"],
        "val.time": compute_seconds(entry) / math.ceil(entry["images"] / batch_images),
        "val.total_ips": entry["images_per_sec"],
    }
