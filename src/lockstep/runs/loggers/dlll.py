"""`DLLL {json}` lines as NVIDIA's dllogger writes them, with the keys and units of the example for
the run's framework: of a run's log, and in a file while a run trains.

Figures that Lockstep does not measure are left out. Figures that it measures differently are in the
example's unit. Keys and units are those of the examples' code (PaddlePaddle 22.05, MXNet's
of 2019 to 2023, PyTorch 21.03, TensorFlow 20.06).
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from lockstep.backends import FRAMEWORKS
from lockstep.recipes import Recipe
from lockstep.runs.loggers import Logger, Opening, Outcome
from lockstep.runs.reading import Epoch, LoggedRun, count_images, count_steps
from lockstep.system.errors import UserError
from lockstep.system.event_log import (
    EvaluateEvent,
    LogEvent,
    StartEvent,
    TrainEvent,
    compute_seconds,
)
from lockstep.system.files import write_text
from lockstep.system.regular_files import RECORDS, read_regular_text
from lockstep.system.strict_json import parsed, to_json

PREFIX = "DLLL "
"""Every line begins with it."""
PER_SEC = "images/s"
SEC = "s"
MS = "ms"


@dataclass(frozen=True)
class Key:
    """The key of a figure in an example."""

    name: str
    figure: str
    """Lockstep's name for the figure: in an entry of the log, in `_compute_speed`, or in a cell of
    a benchmark report."""
    factor: float = 1.0
    """Factor from Lockstep's unit (percent, milliseconds, seconds) to the example's unit."""
    unit: str | None = None
    """The unit in the example's metadata; None if the example gives none."""


@dataclass(frozen=True)
class Keys:
    """The keys of one example."""

    interval: tuple[Key, ...]
    """Keys of training steps."""
    epoch: tuple[Key, ...]
    """Keys of all training steps of an epoch; empty if the example logs none."""
    evaluation: tuple[Key, ...]
    averaged: tuple[Key, ...]
    """Keys of an evaluation of the moving average; empty if the example has none."""
    trained: tuple[Key, ...]
    """Keys of a training benchmark."""
    inferred: tuple[Key, ...]
    """Keys of an inference benchmark."""

    def all(self) -> Iterator[Key]:
        """Yield every key once."""
        yield from {key.name: key for key in chain(*vars(self).values())}.values()


def _make_latency_keys(
    template: str, figures: Iterable[str], factor: float, unit: str
) -> tuple[Key, ...]:
    """Return keys of latencies. `figures` are "FIGURE:PLACE", and the template gets the place."""
    keys = []
    for figure in figures:
        name, place = figure.split(":")
        keys.append(Key(template.format(place), name, factor, unit))
    return tuple(keys)


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
    epoch=(
        Key("train.loss", "loss"),
        Key("train.epoch_time", "all_sec", unit=SEC),
        Key("train.ips", "images_per_sec", unit=PER_SEC),
    ),
    evaluation=(
        Key("val.loss", "loss"),
        Key("val.top1", "top1_percent", 0.01),
        Key("val.top5", "top5_percent", 0.01),
        Key("val.data_time", "data_sec", unit=SEC),
        Key("val.compute_time", "compute_sec", unit=SEC),
        Key("val.batch_time", "batch_sec", unit=SEC),
        Key("val.epoch_time", "all_sec", unit=SEC),
        Key("val.ips", "images_per_sec", unit=PER_SEC),
    ),
    averaged=(),
    trained=(Key("train.ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.ips", "images_per_sec", unit=PER_SEC),
        *_make_latency_keys("latency_{}", ("mean:avg", "p90:p90", "p95:p95", "p99:p99"), 1, MS),
    ),
)
_PYTORCH_TRAIN = (
    Key("train.loss", "loss"),
    Key("train.compute_ips", "compute_images_per_sec", unit=PER_SEC),
    Key("train.total_ips", "images_per_sec", unit=PER_SEC),
    Key("train.data_time", "data_sec", unit=SEC),
    Key("train.compute_time", "compute_sec", unit=SEC),
    Key("train.lr", "lr"),
    Key("train.grad_scale", "loss_scale"),
)
_PYTORCH_VAL = (
    Key("val.top1", "top1_percent"),
    Key("val.top5", "top5_percent"),
    Key("val.loss", "loss"),
    Key("val.compute_ips", "compute_images_per_sec", unit=PER_SEC),
    Key("val.total_ips", "images_per_sec", unit=PER_SEC),
    Key("val.data_time", "data_sec", unit=SEC),
    Key("val.compute_latency", "compute_sec", unit=SEC),
)
_PYTORCH = Keys(
    interval=_PYTORCH_TRAIN,
    epoch=_PYTORCH_TRAIN,
    evaluation=_PYTORCH_VAL,
    averaged=tuple(replace(key, name=key.name.replace("val.", "val_ema.")) for key in _PYTORCH_VAL),
    trained=(Key("train.total_ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.total_ips", "images_per_sec", unit=PER_SEC),
        Key("val.compute_latency", "mean", 0.001, SEC),
        *_make_latency_keys(
            "val.compute_latency_at{}", ("p95:95", "p99:99", "p100:100"), 0.001, SEC
        ),
    ),
)
_MXNET = Keys(
    interval=(
        Key("train.loss", "loss"),
        Key("train.ips", "images_per_sec", unit=PER_SEC),
        Key("train.lr", "lr"),
    ),
    epoch=(
        Key("train.loss", "loss"),
        Key("train.ips", "images_per_sec", unit=PER_SEC),
    ),
    evaluation=(
        Key("val.accuracy", "top1_percent", 0.01),
        Key("val.top_k_accuracy_5", "top5_percent", 0.01),
        Key("val.ips", "images_per_sec", unit=PER_SEC),
        Key("val.latency_avg", "batch_sec", unit=SEC),
    ),
    averaged=(),
    trained=(Key("train.ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("val.ips", "images_per_sec", unit=PER_SEC),
        *_make_latency_keys(
            "val.latency_{}",
            ("mean:avg", "p50:50", "p90:90", "p95:95", "p99:99", "p100:100"),
            0.001,
            SEC,
        ),
    ),
)
_TENSORFLOW = Keys(
    interval=(
        Key("imgs_per_sec", "images_per_sec", unit=PER_SEC),
        Key("cross_entropy", "loss"),
        Key("learning_rate", "lr"),
    ),
    epoch=(),
    evaluation=(
        Key("top1_accuracy", "top1_percent", 0.01),
        Key("top5_accuracy", "top5_percent", 0.01),
        Key("eval_throughput", "images_per_sec", unit=PER_SEC),
        Key("eval_latency_avg", "batch_sec", 1000, MS),
    ),
    averaged=(),
    trained=(Key("total_ips", "images_per_sec", unit=PER_SEC),),
    inferred=(
        Key("eval_throughput", "images_per_sec", unit=PER_SEC),
        *_make_latency_keys(
            "eval_latency_{}", ("mean:avg", "p90:p90", "p95:p95", "p99:p99"), 1, MS
        ),
    ),
)
KEYS = {"PaddlePaddle": _PADDLE, "PyTorch": _PYTORCH, "MXNet": _MXNET, "TensorFlow": _TENSORFLOW}
"""Keys by NVIDIA's example: `Framework.nvidia_example`. The reference backend has no example, so it
uses PyTorch's keys."""


Content = dict[str, Any]
"""A line without its times: METADATA of a figure, or LOG with step and data."""


def format_run(run: LoggedRun) -> str:
    """Return a run's log as lines.

    There is a line of parameters, a line for every interval ([epoch, step]), epoch of training and
    evaluation (both [epoch]), and the figures of the last epoch again ([]). Intervals of profiled
    steps have no figures of speed.
    """
    form = Form(run.environment["execution"]["backend"], run.steps_per_epoch)
    began = run.ended_at - run.seconds
    elapsed = 0.0
    lines: list[str] = []

    def add(contents: Iterable[Content]) -> None:
        lines.extend(format_line(content, began, elapsed) for content in contents)

    add(form.describe(run.recipe.fields() | {"ranks": run.environment["ranks"]}))
    for epoch in run.epochs:
        for entry in chain[TrainEvent | EvaluateEvent](epoch.intervals, epoch.evaluations.values()):
            elapsed += compute_seconds(entry)
            add(form.convert(entry))
    add(form.summarise())
    return "".join(lines)


class Form:
    """Turns the entries of a log, in order, into lines without their times. It keeps the intervals
    of the current epoch."""

    def __init__(self, backend: str, per_epoch: int) -> None:
        """`backend` chooses the keys, `per_epoch` is the number of steps of an epoch."""
        self._keys = KEYS[FRAMEWORKS[backend].nvidia_example]
        self._per_epoch = per_epoch
        self._intervals: list[TrainEvent] = []
        self._last: dict[str, float | None] = {}

    def describe(self, parameters: Mapping[str, Any]) -> list[Content]:
        """Return the lines at the start of a run: the units, and its parameters: the fields of the
        recipe, and others."""
        keys = self._keys if parameters.get("ema_decay") else replace(self._keys, averaged=())
        return [*describe_units(keys.all()), make_line("PARAMETER", dict(parameters))]

    def convert(self, entry: LogEvent) -> list[Content]:
        """Return the lines of an entry: none, one, or two for the last interval of an epoch."""
        if entry["kind"] == "train":
            return self._convert_interval(entry)
        if entry["kind"] != "evaluate" or entry["step"] == 0:  # NVIDIA's code begins with training
            return []
        keys = self._keys.evaluation if entry["weights"] == "trained" else self._keys.averaged
        speed = _compute_speed(
            entry["images"],
            compute_seconds(entry),
            entry.get("batches"),
            entry.get("data_wait_share"),
        )
        figures = rename_figures(keys, entry | speed)
        return self._end_epoch(entry["step"] // self._per_epoch - 1, figures)

    def summarise(self) -> list[Content]:
        """Return the line at the end of a run: the figures of its last epoch and evaluation; none
        if there are none."""
        return [make_line([], self._last)] if self._last else []

    def _convert_interval(self, entry: TrainEvent) -> list[Content]:
        self._intervals.append(entry)
        number = entry["first_step"] // self._per_epoch
        figures = {name: value for name, value in entry.items() if name != "images_per_sec"}
        if "traced" not in entry:
            steps = count_steps([entry])
            share = entry["data_wait_share"]
            figures |= _compute_speed(entry["images"], compute_seconds(entry), steps, share)
        place = [number, entry["step"] - number * self._per_epoch]
        lines = [make_line(place, rename_figures(self._keys.interval, figures))]
        if entry["step"] % self._per_epoch == 0:
            epoch = Epoch(number, tuple(self._intervals), {})
            self._intervals = []
            lines += self._end_epoch(number, rename_figures(self._keys.epoch, _sum_up(epoch)))
        return lines

    def _end_epoch(self, number: int, data: dict[str, float | None]) -> list[Content]:
        self._last = self._last | data
        return [make_line([number], data)] if data else []


def describe_units(keys: Iterable[Key]) -> list[Content]:
    """Return the lines that name the units of figures."""
    return [
        {"type": "METADATA", "metric": key.name, "metadata": {"unit": key.unit}}
        for key in keys
        if key.unit
    ]


def make_line(step: list[int] | str, data: dict[str, Any]) -> Content:
    """Return a line of data. `step` is [epoch, step of the epoch], [epoch], [] for the whole run,
    or "PARAMETER"."""
    return {"type": "LOG", "step": step, "data": data}


def rename_figures(keys: Iterable[Key], figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Return figures under an example's keys and in its units, without those that are missing."""
    renamed: dict[str, float | None] = {}
    for key in keys:
        if key.figure in figures:
            value = figures[key.figure]
            renamed[key.name] = None if value is None else value * key.factor
    return renamed


def format_line(content: Content, began: float, elapsed: float) -> str:
    """Return a line with its times, in dllogger's order: seconds since 1970, local time, and
    seconds since the log began.

    `began` is the start of the log in seconds since 1970, `elapsed` the seconds from there to the
    line.
    """
    at = began + elapsed
    times = {
        "timestamp": str(at),
        "datetime": str(datetime.fromtimestamp(at)),
        "elapsedtime": str(elapsed),
    }
    order = ["timestamp", "datetime", "elapsedtime"]
    if content["type"] == "METADATA":
        order = ["timestamp", "elapsedtime", "datetime"]
    return f"{PREFIX}{to_json({name: times[name] for name in order} | content)}\n"


def _sum_up(epoch: Epoch) -> dict[str, float]:
    """Return the figures of all training steps of an epoch. Profiled steps have no speed."""
    figures = {name: epoch.mean(name) for name in ("loss", "top1_percent", "top5_percent")}
    figures["lr"] = epoch.lr
    figures["loss_scale"] = epoch.intervals[-1]["loss_scale"]
    intervals = epoch.timed_intervals
    seconds = sum(map(compute_seconds, intervals))
    if not seconds:
        return figures
    waited_sec = sum(entry["data_wait_share"] * compute_seconds(entry) for entry in intervals)
    return figures | _compute_speed(
        count_images(intervals), seconds, count_steps(intervals), waited_sec / seconds
    )


def _compute_speed(
    images: int, seconds: float, batches: int | None, share: float | None
) -> dict[str, float]:
    """Return the speed of some batches. `share` is the part of the time in which the engine waited
    for images.

    Logs of older versions have neither batches nor share of an evaluation.
    """
    figures = {"images_per_sec": images / seconds, "all_sec": seconds}
    if batches is None or share is None:
        return figures
    batch = seconds / batches
    data = seconds / batches * share
    compute = max(batch - data, 1e-9)
    return figures | {
        "batch_sec": batch,
        "data_sec": data,
        "compute_sec": compute,
        "compute_images_per_sec": images / seconds * batch / compute,
    }


_TIMES = {"timestamp", "datetime", "elapsedtime"}


class DlllFile(Logger):
    """Writes the lines of dllogger while a run trains.

    The file always has the lines of the log, in its order, and every line is written at once. When
    a run resumes, the lines of steps that are trained again are removed, and lines that are missing
    (of steps that were trained without this logger) are added. Lines that are already in the file
    keep their times.
    """

    key = "dlll"

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._began = time.time()
        self._form: Form | None = None
        self._file: TextIO | None = None

    def entry(self, entry: LogEvent) -> None:
        """Write the lines of an entry."""
        if entry["kind"] == "start":
            self._begin(entry)
        elif self._form is not None:
            self._write(self._form.convert(entry))

    def close(self, outcome: Outcome) -> None:
        """Write the summary of a finished run, and close the file."""
        if self._file is None or self._form is None:
            return
        if outcome == "finished":
            self._write(self._form.summarise())
        self._file.close()

    def _begin(self, start: StartEvent) -> None:
        execution = start["environment"]["execution"]
        about = self._opening.about
        path = Path(execution["dlll_file"] or self._opening.folder / "dlll.json")
        self._form = Form(execution["backend"], start["steps_per_epoch"])
        parameters = {name: about[name] for name in Recipe.model_fields} | {"ranks": about["ranks"]}
        contents = self._form.describe(parameters)
        for entry in self._opening.log:
            contents += self._form.convert(entry)
        self._opening = replace(self._opening, log=())  # a long run has many entries
        there = _read_lines(path)
        lines = []
        for content in contents:
            same_lines = there[_remove_times(content)]
            lines.append(same_lines.popleft() if same_lines else self._format(content))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(lines))
        self._file = path.open("a", encoding="utf-8", buffering=1)  # every line is written at once

    def _write(self, contents: list[Content]) -> None:
        if self._file is not None:
            self._file.writelines(map(self._format, contents))

    def _format(self, content: Content) -> str:
        return format_line(content, self._began, time.time() - self._began)


open_logger = DlllFile


def _read_lines(path: Path) -> dict[str, deque[str]]:
    """Return the lines of a file by what they say apart from their times. A truncated line is left
    out.

    Raises `UserError` if the file has other lines, so that no other file is ever replaced.
    """
    lines_by_content: dict[str, deque[str]] = defaultdict(deque)
    if not path.exists():
        return lines_by_content
    *lines, truncated = read_regular_text(path, RECORDS, errors="replace").split("\n")
    contents = [_parse_line(line) for line in lines]
    if None in contents or not PREFIX.startswith(truncated[: len(PREFIX)]):
        raise UserError(
            f"{path} has lines that are not dllogger's; remove it, or use a different file:"
            " --set dlll_file=FILE"
        )
    for line, content in zip(lines, contents, strict=True):
        lines_by_content[_remove_times(content or {})].append(f"{line}\n")
    return lines_by_content


def _parse_line(line: str) -> Content | None:
    """Return what a whole line says, with its times; None if it is not a line of dllogger."""
    try:
        content = parsed(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _remove_times(content: Content) -> str:
    # through JSON, so that a new line compares equal with one that was read
    values = parsed(to_json(content))
    return to_json({name: value for name, value in values.items() if name not in _TIMES})
