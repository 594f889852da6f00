"""The JSON document of `--report FILE` in NVIDIA's MXNet example, while a run trains
(`lockstep.runs.mxnet_report`).

As there, the file is written again after every epoch of training and after every evaluation. A
reader never sees a part of it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.runs.epochs import Epoch, sum_process_seconds
from lockstep.runs.loggers import Logger, Opening
from lockstep.runs.mxnet_report import compute_metrics, format_document
from lockstep.system.errors import UserError
from lockstep.system.event_log import EvaluateEvent, LogEvent, StartEvent, TrainEvent
from lockstep.system.files import write_text
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import parsed


class NvidiaReport(Logger):
    """Writes the report of the MXNet example."""

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
        """Keep what an entry says, and return whether it ends an epoch's training or evaluation."""
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
    """Raise `UserError` if a file is another one than such a report, so that no other file is ever
    replaced."""
    try:
        text = read_regular(path, TEXT) if path.exists() else b""
        there: Any = parsed(text or b'{"metrics": {}}')
    except ValueError:
        there = None
    if not isinstance(there, dict) or "metrics" not in there:
        raise UserError(
            f"{path} is not a report of this kind; remove it, or give another --set"
            " nvidia_report_file=FILE"
        )
