"""Write `DLLL {json}` lines as NVIDIA's dllogger does, with the keys and units of the example for the run's framework.

What an example logs and Lockstep does not measure is left out. What Lockstep measures differently has the example's unit.
Keys and units are those of the examples' code (PaddlePaddle 22.05, MXNet's of 2019 to 2023, PyTorch 21.03, TensorFlow
20.06).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lockstep.backends import FRAMEWORKS
from lockstep.benchmark.epochs import LoggedRun
from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.system.event_log import TrainEvent, seconds_of
from lockstep.system.strict_json import to_json

PER_SEC, SEC, MS = "images/s", "s", "ms"


@dataclass(frozen=True)
class Key:
    """The key of a figure in an example."""

    name: str
    figure: str
    """Lockstep's name for the figure: in `_of_interval`, in an evaluation of the log, or in a cell of a report."""
    factor: float = 1.0
    """Factor from Lockstep's unit (percent, milliseconds, seconds) to the example's unit."""
    unit: str | None = None
    """The unit in the example's metadata; None if the example gives none."""


@dataclass(frozen=True)
class Keys:
    """The keys of one example."""

    interval: tuple[Key, ...]
    """Keys of training steps."""
    evaluation: tuple[Key, ...]
    trained: tuple[Key, ...]
    """Keys of a training benchmark."""
    inferred: tuple[Key, ...]
    """Keys of an inference benchmark."""

    def all(self) -> Iterator[Key]:
        """Yield every key once."""
        yield from {key.name: key for key in (*self.interval, *self.evaluation, *self.trained, *self.inferred)}.values()


def _latencies(template: str, figures: Iterable[str], factor: float, unit: str) -> tuple[Key, ...]:
    return tuple(Key(template.format(each), name, factor, unit) for name, each in (f.split(":") for f in figures))


_PADDLE = Keys(
    interval=(
        Key("train.loss", "loss"),
        Key("train.top1", "top1_percent", 0.01),
        Key("train.top5", "top5_percent", 0.01),
        Key("train.data_time", "data_sec", unit=SEC),
        Key("train.compute_time", "compute_sec", unit=SEC),
        Key("train.batch_time", "batch_sec", unit=SEC),
        Key("train.ips", "images_per_sec", unit=PER_SEC),
        Key("train.lr", "lr"),
    ),
    evaluation=(
        Key("val.loss", "loss"),
        Key("val.top1", "top1_percent", 0.01),
        Key("val.top5", "top5_percent", 0.01),
        Key("val.ips", "images_per_sec", unit=PER_SEC),
    ),
    trained=(Key("train.ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.ips", "images_per_sec", unit=PER_SEC),
        *_latencies("latency_{}", ("mean:avg", "p90:p90", "p95:p95", "p99:p99"), 1, MS),
    ),
)
_PYTORCH = Keys(
    interval=(
        Key("train.loss", "loss"),
        Key("train.compute_ips", "compute_images_per_sec", unit=PER_SEC),
        Key("train.total_ips", "images_per_sec", unit=PER_SEC),
        Key("train.data_time", "data_sec", unit=SEC),
        Key("train.compute_time", "compute_sec", unit=SEC),
        Key("train.lr", "lr"),
        Key("train.grad_scale", "loss_scale"),
    ),
    evaluation=(
        Key("val.top1", "top1_percent"),
        Key("val.top5", "top5_percent"),
        Key("val.loss", "loss"),
        Key("val.total_ips", "images_per_sec", unit=PER_SEC),
    ),
    trained=(Key("train.total_ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.total_ips", "images_per_sec", unit=PER_SEC),
        Key("val.compute_latency", "mean", 0.001, SEC),
        *_latencies("val.compute_latency_at{}", ("p95:95", "p99:99", "p100:100"), 0.001, SEC),
    ),
)
_MXNET = Keys(
    interval=(
        Key("train.loss", "loss"),
        Key("train.ips", "images_per_sec", unit=PER_SEC),
        Key("train.lr", "lr"),
    ),
    evaluation=(
        Key("val.accuracy", "top1_percent", 0.01),
        Key("val.top_k_accuracy_5", "top5_percent", 0.01),
        Key("val.ips", "images_per_sec", unit=PER_SEC),
    ),
    trained=(Key("train.ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.ips", "images_per_sec", unit=PER_SEC),
        *_latencies("val.latency_{}", ("mean:avg", "p50:50", "p90:90", "p95:95", "p99:99", "p100:100"), 0.001, SEC),
    ),
)
_TENSORFLOW = Keys(
    interval=(
        Key("imgs_per_sec", "images_per_sec", unit=PER_SEC),
        Key("cross_entropy", "loss"),
        Key("learning_rate", "lr"),
    ),
    evaluation=(
        Key("top1_accuracy", "top1_percent", 0.01),
        Key("top5_accuracy", "top5_percent", 0.01),
        Key("eval_throughput", "images_per_sec", unit=PER_SEC),
    ),
    trained=(Key("total_ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("eval_throughput", "images_per_sec", unit=PER_SEC),
        *_latencies("eval_latency_{}", ("mean:avg", "p90:p90", "p95:p95", "p99:p99"), 1, MS),
    ),
)
_OF_SPEED = {"images_per_sec", "compute_images_per_sec", "batch_sec", "data_sec", "compute_sec"}
KEYS = {"PaddlePaddle": _PADDLE, "PyTorch": _PYTORCH, "MXNet": _MXNET, "TensorFlow": _TENSORFLOW}
"""Keys by NVIDIA's example: `Framework.nvidia_example`. The reference engine has no example, so it uses PyTorch's keys."""


def of_run(run: LoggedRun) -> str:
    """Return a run's log as lines.

    There is a line of parameters, a line for every interval ([epoch, step]) and evaluation ([epoch]), and the last
    evaluation again ([]). Intervals of profiled steps have no figures of speed.
    """
    keys = KEYS[FRAMEWORKS[run.environment["execution"]["backend"]].nvidia_example]
    began = run.ended_at - run.seconds
    lines = [_metadata(key, began, 0.0) for key in keys.all() if key.unit]
    lines.append(_line(began, 0.0, "PARAMETER", run.recipe.fields() | {"ranks": run.environment["ranks"]}))
    elapsed, data = 0.0, {}
    for epoch in run.epochs:
        first = epoch.intervals[0]["first_step"]
        for entry in epoch.intervals:
            elapsed += seconds_of(entry)
            step = [epoch.number, entry["step"] - first]
            chosen = [key for key in keys.interval if "traced" not in entry or key.figure not in _OF_SPEED]
            lines.append(_line(began, elapsed, step, _named(chosen, _of_interval(entry))))
        for evaluation in epoch.evaluations.values():
            elapsed += seconds_of(evaluation)
            if evaluation["weights"] == "trained":
                data = _named(keys.evaluation, evaluation)
                lines.append(_line(began, elapsed, [epoch.number], data))
    return "".join([*lines, _line(began, elapsed, [], data)] if data else lines)


def of_benchmark(report: BenchmarkReport) -> str:
    """Return a benchmark's cells as lines: for each measured cell a line of parameters and the summary ([]).

    `report["written_at"]` is the time at which the report was written, in seconds since 1970.
    """
    measured = [cell for cell in report["cells"] if cell["status"] == "ok"]
    began, elapsed = report["written_at"] - sum(sum(cell["times_sec"]) for cell in measured), 0.0
    lines = []
    for cell in measured:
        keys = KEYS[FRAMEWORKS[cell["backend"]].nvidia_example]
        chosen = keys.trained if cell["what"] == "train" else keys.inferred
        parameters = {name: cell[name] for name in ("what", "backend", "model", "dtype", "batch", "ranks", "data")}
        lines += [_metadata(key, began, elapsed) for key in chosen if key.unit]
        lines.append(_line(began, elapsed, "PARAMETER", parameters))
        elapsed += sum(cell["times_sec"])
        lines.append(_line(began, elapsed, [], _named(chosen, cell["latency_ms"] | cell)))
    return "".join(lines)


def _of_interval(entry: TrainEvent) -> dict[str, Any]:
    """Return an interval's figures. The times are means over its steps."""
    seconds = seconds_of(entry) / (entry["step"] - entry["first_step"])
    data = seconds * entry["data_wait_share"]
    compute = max(seconds - data, 1e-9)
    rate = entry["images_per_sec"] * seconds / compute
    return {**entry, "batch_sec": seconds, "data_sec": data, "compute_sec": compute, "compute_images_per_sec": rate}


def _named(keys: Iterable[Key], figures: Mapping[str, Any]) -> dict[str, float]:
    return {key.name: figures[key.figure] * key.factor for key in keys}


def _metadata(key: Key, began: float, elapsed: float) -> str:
    times = _times(began, elapsed)
    ordered = {name: times[name] for name in ("timestamp", "elapsedtime", "datetime")}
    return _written(ordered | {"type": "METADATA", "metric": key.name, "metadata": {"unit": key.unit}})


def _line(began: float, elapsed: float, step: list[int] | str, data: dict[str, Any]) -> str:
    return _written(_times(began, elapsed) | {"type": "LOG", "step": step, "data": data})


def _times(began: float, elapsed: float) -> dict[str, str]:
    """Return the three times of a line as texts: seconds since 1970, local time, and seconds since the start of the log."""
    at = began + elapsed
    return {"timestamp": str(at), "datetime": str(datetime.fromtimestamp(at)), "elapsedtime": str(elapsed)}


def _written(line: dict[str, Any]) -> str:
    return f"DLLL {to_json(line)}\n"
