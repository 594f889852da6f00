"""The recorder passes a run's events on: to `log.jsonl`, to loggers such as TensorBoard, and to a
listener."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

import numpy as np

from lockstep.runs.loggers import Loggers, Opening, Outcome, Picture
from lockstep.system import heartbeat
from lockstep.system.errors import Interrupted, UserError
from lockstep.system.event_log import EvaluateEvent, LogEvent, compute_seconds, read_log
from lockstep.system.files import write_text
from lockstep.system.ranks import is_leading
from lockstep.system.strict_json import to_json

if TYPE_CHECKING:
    from lockstep.runs.events import Event, Listener, PauseEvent

T = TypeVar("T")


class Recorder:
    """Passes events on. A context manager. Until a folder is opened (on rank 0 only), events go
    only to the listener."""

    def __init__(
        self, listener: "Listener | None", loggers: Sequence[str] = ("tensorboard",)
    ) -> None:
        check_listener(listener)
        self._listener = listener
        self._log: TextIO | None = None
        self._names = loggers
        self._loggers: Loggers | None = None
        self._rates = np.zeros(0)
        self._began = time.perf_counter()
        self._paused = False
        self.evaluations: list[EvaluateEvent] = []
        """The log's evaluation entries. Training entries are not kept: a long run has many of them.
        """
        self.train_sec = 0.0
        """Seconds of training in all processes of the run so far, without evaluation and saving."""
        self.notes: list[str] = []
        """The notes of the log: each is logged once in a run."""
        self.restarts = 0
        """The log's number of restarts after a failure."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        heartbeat.note("saving")
        if self._log is not None:
            self._log.close()
        if self._loggers is not None:
            self._loggers.close(self._find_outcome(kind))

    def _find_outcome(self, error: type[BaseException] | None) -> Outcome:
        if error is None:
            return "stopped" if self._paused else "finished"
        return "stopped" if issubclass(error, Interrupted) else "failed"

    def open(
        self,
        folder: Path,
        step: int,
        rates: np.ndarray,
        *,
        evaluates_again: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin or resume the log and the loggers of a run at `step`, on rank 0 only. Loggers get
        `about`.

        Entries that will be written again are removed from the log: entries after the step, a
        truncated line, and with `evaluates_again` the evaluations at the step.
        """
        path = folder / "log.jsonl"
        kept: list[LogEvent] = []
        for entry in read_log(path):
            is_repeated = evaluates_again and entry["kind"] == "evaluate" and entry["step"] == step
            if entry["kind"] != "diverged" and entry["step"] <= step and not is_repeated:
                kept.append(entry)
        write_text(path, "".join(_format_line(entry) for entry in kept))
        for entry in kept:
            self._keep(entry)
        self._log = path.open("a", encoding="utf-8")
        self._loggers = Loggers(
            self._names, Opening(folder, step, about or {}, None, kept), self.warn
        )
        self._rates = rates

    def _keep(self, event: LogEvent) -> None:
        if event["kind"] == "evaluate":
            self.evaluations.append(event)
        if event["kind"] == "train":
            self.train_sec += compute_seconds(event)
        if event["kind"] == "start":
            self.notes += event.get("notes", [])
        if event["kind"] == "restart":
            self.restarts += 1

    @heartbeat.saving()  # a terminal that is held, or a pipe that nobody reads
    def send(self, event: "Event") -> None:
        """Send the listener an event that is not logged."""
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception as error:
            error.add_note(
                f"The listener raised this error on an event of kind {event['kind']}, which stopped"
                " the work. To resume a run from its newest checkpoint, repeat the call."
            )
            raise

    def pause(self, event: "PauseEvent") -> None:
        """Send the listener the event that this command ends before the run; loggers are closed as
        for a stopped run."""
        self._paused = True
        self.send(event)

    def note(self, message: str) -> None:
        """Send the listener a note: something that is allowed, but that users should know before
        the work begins."""
        self.send({"kind": "note", "message": message})

    def warn(self, message: str) -> None:
        """Send the listener a warning: something went wrong, but the run continues."""
        self.send({"kind": "warning", "message": message})

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a function that reports progress; call it with the number of items done and the
        total."""
        return lambda done, total: self.send(
            {"kind": "progress", "what": what, "done": done, "total": total}
        )

    def watch(self, what: str, items: Iterator[T], total: int) -> Iterator[T]:
        """Yield all items and report progress after each."""
        progress = self.progress(what)
        for done, item in enumerate(items, start=1):
            yield item
            progress(done, total)

    @heartbeat.saving()  # a logger may wait for a network
    def log(self, event: LogEvent) -> None:
        """Log an event that has a `step`, and send it to the loggers and the listener."""
        event = event.copy()
        if event["kind"] == "train" and len(self._rates):
            event["lr"] = float(self._rates[event["step"] - 1])
        event["elapsed_sec"] = time.perf_counter() - self._began
        if self._log is not None:
            self._keep(event)
            self._log.write(_format_line(event))
            self._log.flush()
        if self._loggers is not None:
            self._loggers.entry(event)
        self._chart(event)
        self.send(event)

    def show(self, group: str, pictures: Sequence[Picture], step: int) -> None:
        """Send images to the loggers."""
        if self._loggers is not None:
            self._loggers.images(group, pictures, step)

    def flush(self) -> None:
        """Wait until the log is on disk, so that no checkpoint is newer than its log after a power
        failure."""
        if self._log is not None:
            os.fsync(self._log.fileno())

    def _chart(self, event: LogEvent) -> None:
        if self._loggers is None or (event["kind"] != "train" and event["kind"] != "evaluate"):
            return
        group = f"val_{event['weights']}" if event["kind"] == "evaluate" else "train"
        others = {"step", "first_step", "images", "batches", "elapsed_sec", "traced"}
        if "traced" in event:  # the profiler's overhead would distort the speed
            others |= {"images_per_sec", "data_wait_share"}
        figures = {
            name: value
            for name, value in event.items()
            if isinstance(value, float | int) and name not in others
        }
        self._loggers.figures(group, figures, event["step"])


def _format_line(entry: LogEvent) -> str:
    return to_json(entry) + "\n"


def check_listener(listener: object) -> None:
    """Raise `UserError` if a listener cannot be called."""
    if not (listener is None or callable(listener)):
        raise UserError(
            f"listener is {listener!r:.100}; expected a function that takes an event, such as print"
        )


@contextmanager
def show_progress(listener: "Listener | None", *, progress: bool) -> "Iterator[Listener | None]":
    """Yield the listener. Without one, yield one that shows a bar if `progress` asks for it, this
    is the leading rank, and standard error is a terminal or this is a notebook."""
    is_notebook = "ipykernel" in sys.modules
    if listener is not None or not progress or not is_leading():
        yield listener
        return
    if not (sys.stderr.isatty() or is_notebook):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = None if is_notebook else Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}
        steps = 0

        def show(event: "Event") -> None:
            nonlocal steps
            if event["kind"] == "start":
                steps = event["total"]
                for note in event["notes"]:
                    bar.console.print(f"note: {note}", markup=False)
            elif event["kind"] == "train":
                advance("training", event["step"], steps)
            elif event["kind"] == "progress":
                advance(event["what"], event["done"], event["total"])
            elif event["kind"] in ("note", "warning"):
                bar.console.print(f"{event['kind']}: {event['message']}", markup=False)

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        yield show
