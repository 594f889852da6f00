"""Where the events of a run go: `log.jsonl`, loggers such as TensorBoard, and whoever listens."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

import numpy as np

from lockstep.runs.loggers import Loggers, Opening, Picture
from lockstep.system.errors import Interrupted
from lockstep.system.event_log import read_log, seconds_of
from lockstep.system.files import write_text
from lockstep.system.strict_json import to_json

T = TypeVar("T")
Listener = Callable[[dict[str, Any]], None]
"""Told of every event, logged or not; `kind` says what it is."""


class Recorder:
    """Passes events on; a context manager. Without a folder opened (on ranks other than 0) it only tells its listener."""

    def __init__(self, listener: Listener | None, loggers: Sequence[str] = ("tensorboard",)) -> None:
        self._listener = listener
        self._log: TextIO | None = None
        self._names = loggers
        self._loggers: Loggers | None = None
        self._rates = np.zeros(0)
        self._began = time.perf_counter()
        self.evaluations: list[dict[str, Any]] = []
        """The log's entries of evaluations. Those of training are not kept: a long run has many of them."""
        self.train_sec = 0.0
        """Seconds spent training, over all processes of the run; evaluation and saving left out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._log is not None:
            self._log.close()
        if self._loggers is not None:
            stopped = kind is not None and issubclass(kind, Interrupted)
            self._loggers.close("finished" if kind is None else "stopped" if stopped else "failed")

    def open(
        self,
        folder: Path,
        step: int,
        rates: np.ndarray,
        *,
        evaluates_again: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin or continue the log and the loggers of a run that stands at `step`; only rank 0 does. They are told `about`.

        What is made again is dropped from the log: entries after the step and a line that was cut off, and with
        `evaluates_again` the evaluations at the step.
        """
        path = folder / "log.jsonl"
        kept = [
            entry
            for entry in read_log(path)
            if entry["kind"] != "diverged"
            and (entry["step"] < step or (entry["step"] == step and not (evaluates_again and entry["kind"] == "evaluate")))
        ]
        write_text(path, "".join(_line(entry) for entry in kept))
        for entry in kept:
            self._note(entry)
        self._log = path.open("a", encoding="utf-8")
        self._loggers = Loggers(self._names, Opening(folder, step, about or {}, None), self.warn)
        self._rates = rates

    def _note(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "evaluate":
            self.evaluations.append(entry)
        if entry["kind"] == "train":
            self.train_sec += seconds_of(entry)

    def tell(self, event: dict[str, Any]) -> None:
        """Tell the listener of something that is not logged."""
        if self._listener is not None:
            self._listener(event)

    def note(self, message: str) -> None:
        """Tell the listener of something that is allowed and that users like to know before the work begins."""
        self.tell({"kind": "note", "message": message})

    def warn(self, message: str) -> None:
        """Tell the listener of something that went wrong and does not end the run."""
        self.tell({"kind": "warning", "message": message})

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a function to be called with what is done and the total."""
        return lambda done, total: self.tell({"kind": "progress", "what": what, "done": done, "total": total})

    def watched(self, what: str, items: Iterator[T], total: int) -> Iterator[T]:
        """Yield all items, telling how many of the total were taken."""
        progress = self.progress(what)
        for done, item in enumerate(items, start=1):
            yield item
            progress(done, total)

    def log(self, event: dict[str, Any]) -> None:
        """Log an event that has a `step`, chart its figures and tell the listener."""
        if event["kind"] == "train" and len(self._rates):
            event = event | {"lr": float(self._rates[event["step"] - 1])}
        event = event | {"elapsed_sec": time.perf_counter() - self._began}
        if self._log is not None:
            self._note(event)
            self._log.write(_line(event))
            self._log.flush()
        self._chart(event)
        self.tell(event)

    def show(self, group: str, pictures: Sequence[Picture], step: int) -> None:
        """Hand images to the loggers."""
        if self._loggers is not None:
            self._loggers.images(group, pictures, step)

    def flush(self) -> None:
        """Wait until the log is on the disk, so that no checkpoint is newer than its log after a power cut."""
        if self._log is not None:
            os.fsync(self._log.fileno())

    def _chart(self, event: dict[str, Any]) -> None:
        group = {"train": "train", "evaluate": f"val_{event.get('weights')}"}.get(event["kind"])
        if self._loggers is None or group is None:
            return
        others = {"step", "first_step", "images", "elapsed_sec", "traced"}
        if "traced" in event:  # what the profiler costs is no speed
            others |= {"images_per_sec", "data_wait_share"}
        figures = {name: value for name, value in event.items() if isinstance(value, float | int) and name not in others}
        self._loggers.figures(group, figures, event["step"])


def _line(entry: dict[str, Any]) -> str:
    return to_json(entry) + "\n"
